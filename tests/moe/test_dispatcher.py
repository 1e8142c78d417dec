"""A MoE layer over several ranks equals the layer on one rank, whatever the tokens and the way they travel."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from moe.dispatcher import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Dispatcher,
    DispatchKind,
    LocalDispatcher,
    make_dispatcher,
)
from moe.router import Routing
from parallel.group import Group, Pending, PendingRows, Ready, SoloGroup
from parallel.layout import Layout, RankGroups, solo_groups
from parallel.ledger import Entry, Ledger, LedgerGroup
from tests.small_layers import HIDDEN, NUM_EXPERTS, TOP_K, LayerWeights, run_moe
from tests.thread_group import run_ranks

KINDS: list[DispatchKind] = ["all_gather", "all_to_all"]
LAYOUTS = [Layout(), Layout(dp=2), Layout(tp=2), Layout(dp=4), Layout(tp=4), Layout(dp=2, tp=2)]


def back_end(kind: DispatchKind, group: Group, num_local_experts: int | None = None) -> Dispatcher:
    """Also for a group of one, for which make_dispatcher takes the local one."""
    make = AllGatherDispatcher if kind == "all_gather" else AllToAllDispatcher
    return make(group, num_local_experts or NUM_EXPERTS // group.size)


def random_tokens(counts: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, HIDDEN, generator=generator) for n in counts]


def check_against_one_rank(
    kind: DispatchKind, layout: Layout, weights: LayerWeights, tokens: list[Tensor], dummies: list[Tensor] | None = None
) -> list[list[Entry]]:
    """Compares every rank's output; returns the ranks' ledgers."""
    capacity = max(len(rows) for rows in tokens)

    def work(rank: int, groups: RankGroups) -> tuple[Tensor, list[Entry]]:
        ledger = Ledger()
        ep = LedgerGroup(groups.ep, ledger)
        layer = weights.moe(ep, back_end(kind, ep))
        dummy = None if dummies is None else dummies[rank]
        return run_moe(layer, tokens[rank], dummy, capacity), ledger.entries

    results = run_ranks(layout, work)
    whole = weights.moe(SoloGroup("ep"), LocalDispatcher())
    for rank, (found, _) in enumerate(results):
        expected = run_moe(whole, tokens[rank], None if dummies is None else dummies[rank])
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-5)
    return [entries for _, entries in results]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("counts", [[5, 5, 5, 5], [3, 0, 7, 1], [0, 0, 2, 0], [0, 0, 0, 0]], ids=str)
def test_random_tokens(kind: DispatchKind, layout: Layout, counts: list[int]) -> None:
    check_against_one_rank(kind, layout, LayerWeights(0), random_tokens(counts[: layout.ep]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("favourite", [0, NUM_EXPERTS - 1])
def test_all_tokens_to_the_experts_of_one_rank(kind: DispatchKind, favourite: int) -> None:
    bias = torch.full((NUM_EXPERTS,), -100.0)
    own = NUM_EXPERTS // 2  # of each of two ranks
    first = favourite // own * own
    bias[first : first + own] = 0.0
    bias[favourite] = 100.0
    weights = LayerWeights(1, bias)
    check_against_one_rank(kind, Layout(dp=2), weights, random_tokens([6, 4]))


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_tokens_get_the_shared_expert_only(kind: DispatchKind) -> None:
    weights, tokens = LayerWeights(2), random_tokens([4, 3, 2, 1])
    dummies = [torch.arange(len(rows)) % 2 == 0 for rows in tokens]
    check_against_one_rank(kind, Layout(dp=2, tp=2), weights, tokens, dummies)
    output = run_ranks(
        Layout(dp=2, tp=2),
        lambda rank, groups: run_moe(weights.moe(groups.ep, back_end(kind, groups.ep)), tokens[rank], dummies[rank], 4),
    )
    shared = weights.shared.part(0, 1)
    for rank, found in enumerate(output):
        assert torch.allclose(found[dummies[rank]], shared(tokens[rank])[dummies[rank]], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_spoils_its_own_token_only(kind: DispatchKind) -> None:
    weights, tokens = LayerWeights(3), random_tokens([4, 4])
    spoilt = [tokens[0].clone(), tokens[1]]
    spoilt[0][2] = torch.nan

    def run(given: list[Tensor]) -> list[Tensor]:
        return run_ranks(
            Layout(dp=2),
            lambda rank, groups: run_moe(weights.moe(groups.ep, back_end(kind, groups.ep)), given[rank], None, 4),
        )

    clean, found = run(tokens), run(spoilt)
    others = torch.tensor([0, 1, 3])
    assert torch.allclose(found[0][others], clean[0][others], atol=1e-6)
    assert torch.allclose(found[1], clean[1], atol=1e-6)
    assert found[0][2].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_ledger_is_the_same_on_all_ranks_whatever_the_tokens(kind: DispatchKind) -> None:
    ledgers = []
    for counts, seed in [([3, 0, 6, 1], 0), ([0, 6, 0, 0], 1)]:
        ledgers += check_against_one_rank(kind, Layout(dp=4), LayerWeights(seed), random_tokens(counts, seed))
    assert all(entries == ledgers[0] for entries in ledgers)
    operations = [operation for _, _, _, operation, _ in ledgers[0]]
    expected = {
        "all_gather": ["all_gather", "all_to_all"],
        "all_to_all": ["all_to_all_sized", "all_to_all_uneven"],
    }
    assert operations == expected[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_partial_sums_are_added_in_rank_order(kind: DispatchKind) -> None:
    """((1 + 2^30) - 2^30) + 3 is 3 in float32; the reverse gives 1, pairs 0, others 0 or 4."""
    partial = [1.0, 2.0**30, -(2.0**30), 3.0]

    def work(rank: int, groups: RankGroups) -> Tensor:
        dispatcher = back_end(kind, groups.ep)
        ids = torch.tensor([[7, 5, 2, 0]]).expand(3, -1)  # one expert of each rank
        sent = dispatcher.dispatch_send(dispatcher.announce(torch.ones(3, HIDDEN), Routing(ids, torch.ones(3, 4))))
        hidden = dispatcher.dispatch_recv(sent).hidden
        return dispatcher.combine_recv(dispatcher.combine_send(torch.full_like(hidden, partial[rank]), sent))

    for found in run_ranks(Layout(dp=2, tp=2), work):
        assert torch.equal(found, torch.full((3, HIDDEN), 3.0))


class ShapesOnly:
    """One of two ranks on the meta device: results have shapes but no values, so that reading one back fails."""

    name, rank, size = "ep", 1, 2

    def all_gather(self, x: Tensor) -> Pending:
        return Ready(x.new_empty((2 * x.shape[0], *x.shape[1:])))

    def reduce_scatter(self, x: Tensor) -> Pending:
        return Ready(x.new_empty((x.shape[0] // 2, *x.shape[1:])))

    def all_to_all(self, x: Tensor) -> Pending:
        return Ready(torch.empty_like(x))

    def all_to_all_uneven(self, x: Tensor, send: object, receive: object) -> Pending:
        raise AssertionError("needs counts on the host")

    def all_to_all_sized(self, x: Tensor, send: object, most: int) -> PendingRows:
        raise AssertionError("needs counts on the host")


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_all_gather_never_reads_from_the_device(kind: DispatchKind) -> None:
    dispatcher = back_end(kind, ShapesOnly())
    hidden, ids = torch.empty(5, HIDDEN, device="meta"), torch.empty(5, TOP_K, dtype=torch.int64, device="meta")
    routing = Routing(ids, torch.empty(5, TOP_K, device="meta"))

    def run() -> tuple[Tensor, Tensor]:
        sent = dispatcher.dispatch_send(dispatcher.announce(hidden, routing, 7))
        dispatched = dispatcher.dispatch_recv(sent)
        output = torch.empty_like(dispatched.hidden)
        return dispatched.hidden, dispatcher.combine_recv(dispatcher.combine_send(output, sent))

    if kind == "all_to_all":
        with pytest.raises((RuntimeError, NotImplementedError)):
            run()
        return
    gathered, combined = run()
    assert gathered.shape == (14, HIDDEN)
    assert combined.shape == (5, HIDDEN)


def test_the_all_gather_refuses_more_tokens_than_its_capacity() -> None:
    routing = Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    with pytest.raises(AssertionError, match=r"\(2, 3\)"):
        AllGatherDispatcher(SoloGroup("ep"), 1).announce(torch.ones(3, HIDDEN), routing, 2)


def test_the_device_settles_the_back_end_unless_told() -> None:
    class Pair(SoloGroup):
        size = 2

    ep = Pair("ep")
    assert isinstance(make_dispatcher("auto", ep, 8, "cpu"), AllToAllDispatcher)
    assert isinstance(make_dispatcher("auto", ep, 8, torch.device("cuda")), AllGatherDispatcher)
    assert isinstance(make_dispatcher("all_gather", ep, 8, "cpu"), AllGatherDispatcher)
    assert isinstance(make_dispatcher("all_to_all", ep, 8, "cuda"), AllToAllDispatcher)
    for kind in get_args(DispatchKind):
        assert isinstance(make_dispatcher(kind, solo_groups().ep, 8, "cpu"), LocalDispatcher)
    with pytest.raises(ValueError, match="7 experts do not divide by the 2 ranks"):
        make_dispatcher("auto", ep, 7, "cpu")
    with pytest.raises(ValueError, match="dispatch = 'ring': expected one of auto, all_gather, all_to_all"):
        make_dispatcher("ring", ep, 8, "cpu")  # type: ignore[arg-type]
