"""A rank whose collectives differ is named, whatever the order in which the pages come in."""

from __future__ import annotations

import itertools

import pytest
import torch

from parallel.group import SoloGroup
from parallel.layout import Layout
from parallel.ledger import Ledger, LedgerGroup
from runtime.ledger_check import LedgerCheck

LAYOUT = Layout(dp=2, tp=2)


def pages() -> list[dict[str, int]]:
    return [{"ep": 7, "tp": 1}, {"ep": 7, "tp": 1}, {"ep": 7, "tp": 2}, {"ep": 7, "tp": 2}]


@pytest.mark.parametrize(
    ("rank", "axis", "message"),
    [
        (2, "ep", "rank 2 made other collectives on ep than rank 0 in step 5"),
        (3, "tp", "rank 3 made other collectives on tp than rank 2 in step 5"),
    ],
)
def test_the_difference_is_named(rank: int, axis: str, message: str) -> None:
    for order in itertools.permutations(range(4)):
        check, wrong = LedgerCheck(LAYOUT), pages()
        wrong[rank][axis] += 1
        assert [check.add(r, 5, wrong[r]) for r in order] == [None, None, None, message]


def test_steps_may_overlap() -> None:
    check = LedgerCheck(LAYOUT)
    for step_id, rank in [(1, 0), (1, 1), (2, 0), (1, 2), (2, 1), (1, 3), (2, 2), (2, 3)]:
        assert check.add(rank, step_id, pages()[rank]) is None


def test_a_rank_that_was_called_out_of_half_b_goes_on_like_one_that_has_just_started() -> None:
    ledgers = [Ledger(), Ledger(step=40, half=1)]
    for ledger in ledgers:
        ledger.take_digests()  # as when a rank joins the others again
        LedgerGroup(SoloGroup("ep"), ledger).all_gather(torch.zeros(1))
    assert ledgers[0].take_digests() == ledgers[1].take_digests()
