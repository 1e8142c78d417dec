"""Layers over ranks and halves equal one rank with one half, and all ranks make the same calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moe.dispatcher import AllGatherDispatcher, AllToAllDispatcher, Dispatcher, DispatchKind, LocalDispatcher
from parallel.group import Group
from parallel.layout import Layout, RankGroups, solo_groups
from parallel.ledger import Entry, Ledger, LedgerGroup
from parallel.tokens import gather_tokens, local_slice, num_local_tokens
from runtime.models.decoder import DecoderLayer, HalfState
from runtime.overlap import run_layers
from tests.small_layers import HIDDEN, NUM_EXPERTS, LayerWeights, empty_caches, half
from tests.thread_group import run_ranks

KINDS: list[DispatchKind] = ["all_gather", "all_to_all"]
LAYOUTS = [Layout(), Layout(dp=2), Layout(tp=2), Layout(dp=4), Layout(tp=4), Layout(dp=2, tp=2)]
SIZES = [(5, 4), (3, 0), (0, 0), (1, 6)]  # tokens in half A and B of each dp group
WEIGHTS = [LayerWeights(seed) for seed in range(3)]


def back_end(kind: DispatchKind, group: Group) -> Dispatcher:
    make = AllGatherDispatcher if kind == "all_gather" else AllToAllDispatcher
    return make(group, NUM_EXPERTS // group.size)


def build_layers(tp: Group, ep: Group, dispatcher: Dispatcher) -> list[DecoderLayer]:
    """A dense layer, then two MoE layers, one of them without a shared expert."""
    moe = [None, WEIGHTS[1].moe(ep, dispatcher), WEIGHTS[2].moe(ep, dispatcher, shared=False)]
    return [weights.decoder(i, tp, moe[i]) for i, weights in enumerate(WEIGHTS)]


def group_tokens(dp_rank: int, num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(dp_rank))


def group_dummies(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens) % 4 == 3


def one_rank(tokens: Tensor) -> Tensor:
    groups = solo_groups()
    layers = build_layers(groups.tp, groups.ep, LocalDispatcher())
    state = half(tokens.clone(), len(tokens), 0, empty_caches(3, len(tokens)), group_dummies(len(tokens)))
    run_layers(layers, [state])
    return state.hidden


def scattered(tp: Group, tokens: Tensor, start: int, kv: list[Tensor], dummy: Tensor, capacity: int) -> HalfState:
    """One half of a group's tokens as one rank of tp begins with it."""
    num_local = num_local_tokens(tp, len(tokens))
    padded = torch.ones(tp.size * num_local, dtype=torch.bool)  # padding goes to no expert
    padded[: len(dummy)] = dummy
    here = padded[tp.rank * num_local : (tp.rank + 1) * num_local]
    return half(local_slice(tp, tokens).clone(), len(tokens), start, kv, here, num_local_tokens(tp, capacity))


def run_sharded(
    kind: DispatchKind, layout: Layout, sizes: Sequence[tuple[int, ...]]
) -> list[tuple[Tensor, list[Entry]]]:
    """Per rank its dp group's output and its ledger. sizes: per dp group the tokens of each half."""
    capacities = [max(counts) for counts in zip(*sizes, strict=True)]

    def work(rank: int, groups: RankGroups) -> tuple[Tensor, list[Entry]]:
        ledger = Ledger()
        tp, ep = LedgerGroup(groups.tp, ledger), LedgerGroup(groups.ep, ledger)
        mine = sizes[layout.dp_rank(rank)]
        tokens, dummy = group_tokens(layout.dp_rank(rank), sum(mine)), group_dummies(sum(mine))
        kv, halves, start = empty_caches(3, sum(mine)), [], 0
        for count, capacity in zip(mine, capacities, strict=True):
            here = slice(start, start + count)
            halves.append(scattered(tp, tokens[here], start, kv, dummy[here], capacity))
            start += count
        run_layers(build_layers(tp, ep, back_end(kind, ep)), halves, ledger)
        assert ledger.half == 0
        entries = list(ledger.entries)
        full = [gather_tokens(groups.tp, state.hidden, state.num_tokens) for state in halves]
        return torch.cat(full), entries

    return run_ranks(layout, work)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("num_halves", [1, 2])
def test_ranks_and_halves_equal_one_rank_with_one_half(kind: DispatchKind, layout: Layout, num_halves: int) -> None:
    sizes = [pair if num_halves == 2 else (sum(pair),) for pair in SIZES[: layout.dp]]
    for rank, (found, _) in enumerate(run_sharded(kind, layout, sizes)):
        dp_rank = layout.dp_rank(rank)
        expected = one_rank(group_tokens(dp_rank, sum(sizes[dp_rank])))
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-5)


def test_the_halves_are_not_independent() -> None:
    """The control of the test above: B's tokens see A's, so running B alone gives something else."""
    tokens = group_tokens(0, 9)
    whole, alone = one_rank(tokens)[5:], one_rank(tokens[5:])
    assert not torch.allclose(whole, alone, atol=1e-2)


def test_dummy_tokens_see_no_expert() -> None:
    tp, ep = solo_groups().tp, solo_groups().ep
    layer = WEIGHTS[2].decoder(0, tp, WEIGHTS[2].moe(ep, LocalDispatcher(), shared=False))

    def start(dummy: Tensor | None) -> HalfState:
        return half(group_tokens(0, 4), 4, 0, empty_caches(1, 4), dummy)

    attended, masked, routed = start(None), start(torch.tensor([False, True, False, True])), start(None)
    layer.attend(attended)
    run_layers([layer], [masked])
    run_layers([layer], [routed])
    assert torch.equal(masked.hidden[1::2], attended.hidden[1::2])
    assert torch.allclose(masked.hidden[::2], routed.hidden[::2], atol=1e-6)
    assert not torch.allclose(routed.hidden, attended.hidden, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(dp=2, tp=2), Layout(tp=4)], ids=str)
def test_the_ledger_is_the_same_on_all_ranks(kind: DispatchKind, layout: Layout) -> None:
    ledgers = [entries for _, entries in run_sharded(kind, layout, SIZES[: layout.dp])]
    over_ep = [[entry for entry in entries if entry[2] == "ep"] for entries in ledgers]
    assert all(entries == over_ep[0] for entries in over_ep)
    assert {entry[1] for entry in over_ep[0]} == {0, 1}
    # Groups differ in the size of what their ranks exchange among themselves, never in what they call.
    calls = [[entry[:4] for entry in entries] for entries in ledgers]
    assert all(entries == calls[0] for entries in calls)
    for rank, entries in enumerate(ledgers):
        assert entries == ledgers[layout.dp_rank(rank) * layout.tp]
