"""Halves between whole and scattered: sums, padding, empty halves, and both under way at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel.halves import gather_halves, join_tokens, scatter_sums, split_tokens
from parallel.layout import Layout, RankGroups, solo_groups
from parallel.ledger import Ledger, LedgerGroup
from tests.thread_group import run_ranks

WHOLE = torch.arange(1.0, 19.0).view(9, 2)


@pytest.mark.parametrize("sizes", [[9], [5, 4], [9, 0], [0, 9], [8, 1]])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_sum_is_scattered_and_gathered_again(sizes: list[int], tp: int) -> None:
    def work(rank: int, groups: RankGroups) -> tuple[list[Tensor], Tensor]:
        local = scatter_sums(groups.tp, split_tokens(WHOLE * (rank + 1), sizes))
        return local, gather_halves(groups.tp, local, sizes)

    total = WHOLE * sum(range(1, tp + 1))
    results = run_ranks(Layout(tp=tp), work)
    for i, expected in enumerate(split_tokens(total, sizes)):
        scattered = torch.cat([local[i] for local, _ in results])
        assert torch.equal(scattered[: len(expected)], expected)
        assert scattered[len(expected) :].abs().sum() == 0
        assert len(scattered) - len(expected) < tp
    assert all(torch.equal(gathered, total) for _, gathered in results)


def test_alone_nothing_is_copied() -> None:
    tp = solo_groups().tp
    (half,) = split_tokens(WHOLE, [9])
    assert half is WHOLE
    assert scatter_sums(tp, [half])[0] is WHOLE
    assert gather_halves(tp, [half], [9]) is WHOLE
    assert torch.equal(join_tokens(split_tokens(WHOLE, [4, 5])), WHOLE)


def test_both_halves_are_under_way_before_one_is_awaited() -> None:
    class Waiting:
        def __init__(self, result: Tensor) -> None:
            self._result = result

        def wait(self) -> Tensor:
            started.append("wait")
            return self._result

    class Group:
        name, rank, size = "tp", 0, 2

        def all_gather(self, x: Tensor) -> Waiting:
            started.append("all_gather")
            return Waiting(torch.cat((x, x)))

        def reduce_scatter(self, x: Tensor) -> Waiting:
            started.append("reduce_scatter")
            return Waiting(x[: len(x) // 2])

    started: list[str] = []
    local = scatter_sums(Group(), split_tokens(WHOLE, [5, 4]))  # type: ignore[arg-type]
    gather_halves(Group(), local, [5, 4])  # type: ignore[arg-type]
    assert started == ["reduce_scatter"] * 2 + ["wait"] * 2 + ["all_gather"] * 2 + ["wait"] * 2


def test_ranks_make_the_same_calls_with_an_empty_half() -> None:
    def work(rank: int, groups: RankGroups) -> list[object]:
        ledger = Ledger()
        gather_halves(LedgerGroup(groups.tp, ledger), scatter_sums(groups.tp, [WHOLE, WHOLE[:0]]), [9, 0])
        return list(ledger.entries)

    first, second = run_ranks(Layout(tp=2), work)
    assert first == second
    assert [entry[-1] for entry in first] == [(5, 2), (0, 2)]  # type: ignore[index]
