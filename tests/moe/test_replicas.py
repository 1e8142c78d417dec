"""Which replica a token takes: always one that holds the expert, in the parts asked for, near ones first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.balance import initial_placement, place_experts
from moe.dispatcher import DispatchKind, LocalDispatcher
from moe.layer import MoeLayer
from moe.moves import in_batches, plan_moves
from moe.placed import PlacedLayer
from moe.placement import Placement, imbalance
from moe.replicas import PERIOD, ReplicaMap, first_slots, replica_table, spread
from moe.router import Router, Routing
from moe.shares import traffic
from parallel.group import SoloGroup
from parallel.layout import Layout, RankGroups
from tests.moe.test_dispatcher import KINDS, back_end, random_tokens
from tests.small_layers import CONFIG, HIDDEN, NUM_EXPERTS, LayerWeights, run_moe
from tests.thread_group import run_ranks


def random_placement(seed: int, num_ranks: int = 4, num_experts: int = 8, num_slots: int = 4) -> Placement:
    loads = np.random.default_rng(seed).random((2, num_experts)) ** 5
    return place_experts(loads, [2, 5], num_ranks=num_ranks, num_slots=num_slots)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (6, 3)]))
def test_traffic_gives_every_replica_its_share(seed: int, shape: tuple[int, int]) -> None:
    num_ranks, per_node = shape
    shares = np.random.default_rng(seed).random((5, num_ranks)) ** 4
    shares[np.random.default_rng(seed + 1).random(shares.shape) < 0.4] = 0.0
    shares[:, 0] += 1e-3
    shares /= shares.sum(1, keepdims=True)
    sent = np.stack([traffic(shares, per_node, rank) for rank in range(num_ranks)], 1)  # [5, from, to]
    assert (sent >= -1e-12).all()
    assert sent.sum(2) == pytest.approx(1.0)
    assert sent.mean(1) == pytest.approx(shares), "replicas get other parts than they should"
    own = sent[:, np.arange(num_ranks), np.arange(num_ranks)]
    assert own == pytest.approx(np.minimum(shares * num_ranks, 1.0)), "a rank sends away what it could keep"
    nodes = shares.reshape(5, -1, per_node).sum(2)  # a node keeps what its replicas may take
    blocks = sent.reshape(5, num_ranks // per_node, per_node, num_ranks // per_node, per_node).sum((2, 4))
    inside = np.einsum("nii->ni", blocks) / per_node
    assert inside == pytest.approx(np.minimum(nodes * num_ranks / per_node, 1.0))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10_000))
def test_every_entry_leads_to_a_holder(seed: int) -> None:
    placement = random_placement(seed)
    for rank in range(placement.num_ranks):
        for idx, layer in enumerate(placement.layers):
            table = replica_table(placement, layer, rank, 2)
            assert table.shape == (placement.num_experts + 1, PERIOD)
            flat = placement.experts[idx].reshape(-1)
            for expert in range(placement.num_experts):
                assert set(flat[table[expert].numpy()].tolist()) == {expert}
            assert set(table[-1].tolist()) == {len(flat)}


def test_entries_follow_the_parts_also_over_a_few() -> None:
    rows = np.array([[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.9, 0.0, 0.1]])
    taken = spread(rows, 0)
    for row, ranks in zip(rows, taken, strict=True):
        counts = np.bincount(ranks, minlength=3)
        assert counts == pytest.approx(row * PERIOD, abs=1)
    assert taken[0, :4].tolist() == [0, 1, 0, 1]
    assert spread(rows, 1)[0, :4].tolist() == [1, 0, 1, 0], "the first tokens of two ranks take different replicas"
    many = np.repeat(rows[:2], 30, 0)
    for part in (many[:30], many[30:]):
        counts = np.bincount(spread(part, 2)[:, 0], minlength=3)
        assert counts == pytest.approx(part[0] * 30, abs=1), "the first tokens of many experts go everywhere"


@pytest.mark.parametrize("per_node", [4, 2])
@pytest.mark.parametrize(("batch", "limit"), [(8, 1.15), (64, 1.05)])
def test_ranks_get_the_load_that_the_placement_means_them_to_have(per_node: int, batch: int, limit: float) -> None:
    """Small batches see the first entries of a table only, and come less close."""
    generator = torch.Generator().manual_seed(0)
    law = 1.0 / torch.arange(1, 17) ** 1.5
    loads = (1e4 * law).numpy().astype(np.float64)[None]
    placement = place_experts(loads, [0], num_ranks=4, num_slots=6)
    arrived = np.zeros(4)
    for rank in range(4):
        replicas = ReplicaMap(replica_table(placement, 0, rank, per_node))
        for _ in range(3200 // batch):
            ids = torch.multinomial(law, batch, replacement=True, generator=generator).view(batch, 1)
            slots = replicas(Routing(ids, torch.ones(batch, 1))).expert_ids
            arrived += np.bincount(slots.flatten().numpy() // 6, minlength=4)
    assert arrived.max() / arrived.mean() < limit
    first = initial_placement([0], 16, 4, 6)
    assert imbalance(first, loads)[0] > 1.3, "without it one rank has far more"


def test_a_token_with_a_replica_here_stays_here() -> None:
    placement = initial_placement([0], 4, 2, 4)  # every rank holds all
    for rank in range(2):
        table = replica_table(placement, 0, rank, 2)
        assert ((table[:-1] // 4) == rank).all()


def test_of_two_slots_of_one_rank_the_first_serves() -> None:
    slots = first_slots(np.array([[1, 0, 1], [0, 0, 1]], np.int32), 2)
    assert slots.tolist() == [[1, 0], [0, 2]]


def test_loads_count_routes_but_not_those_to_no_expert() -> None:
    placement = random_placement(1)
    replicas = ReplicaMap(replica_table(placement, 5, 0, 2))
    ids = torch.tensor([[0, 3], [3, 1], [8, 8]])
    for _ in range(2):
        replicas(Routing(ids, torch.ones(3, 2)))
    assert replicas.take_counts().tolist() == [2, 2, 0, 4, 0, 0, 0, 0]
    assert replicas.take_counts().sum() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, tp=2), Layout(dp=3)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_layer_over_placed_experts_equals_the_layer_alone(kind: DispatchKind, layout: Layout, seed: int) -> None:
    """Also where ranks do not divide the experts, and after another placement has taken the first one's place."""
    weights, tokens = LayerWeights(seed), random_tokens([70, 0, 3, 5][: layout.ep], seed)
    num_slots = -(-NUM_EXPERTS // layout.ep) + 1
    first, second = (random_placement(seed + i, layout.ep, NUM_EXPERTS, num_slots) for i in (0, 7))
    dummies = [torch.arange(len(rows)) % 3 == 1 for rows in tokens]
    capacity = max(len(rows) for rows in tokens)

    def work(rank: int, groups: RankGroups) -> list[torch.Tensor]:
        def held(placement: Placement) -> list[int]:
            experts: list[int] = placement.experts[0, rank].tolist()
            return experts

        def tables(placement: Placement) -> torch.Tensor:
            return replica_table(placement, 2, rank, layout.ep)

        mlps = [weights.part(0, 1) for weights in weights.experts]
        placed = PlacedLayer(held(first), [mlps[e] for e in held(first)], tables(first))
        dispatcher = back_end(kind, groups.ep, num_slots)
        router = Router(CONFIG, weights.router, weights.bias)
        layer = MoeLayer(router, dispatcher, placed.experts, weights.shared.part(0, 1), placed.replicas)
        before = run_moe(layer, tokens[rank], dummies[rank], capacity)
        placed.use(held(second), [mlps[e] for e in held(second)], tables(second))
        return [before, run_moe(layer, tokens[rank], dummies[rank], capacity)]

    whole = weights.moe(SoloGroup("ep"), LocalDispatcher())
    for rank, outputs in enumerate(run_ranks(layout, work)):
        expected = run_moe(whole, tokens[rank], dummies[rank])
        for found in outputs:
            assert found.shape == (len(tokens[rank]), HIDDEN)
            assert torch.allclose(found, expected, atol=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 50), st.integers(1, 120))
def test_moves_bring_what_is_missing_in_pieces_that_fit(seed: int, num_values: int, most: int) -> None:
    old, new = random_placement(seed), random_placement(seed + 1)
    moves = plan_moves(old, new, 2)
    missing = {
        (layer, expert, rank)
        for idx, layer in enumerate(new.layers)
        for expert, rank in np.argwhere(new.holds()[idx] & ~old.holds()[idx]).tolist()
    }
    assert {(m.layer, m.expert, m.target) for m in moves} == missing
    assert len(moves) == len(missing)
    for move in moves:
        assert old.holds()[old.index(move.layer), move.expert, move.source], "the source does not have it"
    pieces: dict[object, int] = {}
    for batch in in_batches(moves, num_values, most):
        for rank in range(old.num_ranks):
            for moved in ([m for m in batch.moves if m.source == rank], [m for m in batch.moves if m.target == rank]):
                assert len(moved) * (batch.end - batch.begin) <= most, "sent or received"
        for move in batch.moves:
            assert pieces.get(move, 0) == batch.begin, "pieces come in order, without gaps"
            pieces[move] = batch.end
    assert pieces == dict.fromkeys(moves, num_values)
