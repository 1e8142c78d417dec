"""Placements over random loads: every expert present, no duplicates, never behind the published greedy method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe.balance import initial_placement, place_experts
from moe.packing import greedy_slots
from moe.placement import Placement, check_counts, check_placement, imbalance
from moe.shares import fill_level, level_parts

FloatArray = NDArray[np.float64]


def published_greedy(loads: list[float], num_ranks: int, num_slots: int) -> list[float]:
    """Balanced packing in plain Python: the load of each rank, replicas of an expert sharing equally."""
    copies = [1] * len(loads)
    while sum(copies) < num_ranks * num_slots:
        heaviest = max(range(len(loads)), key=lambda e: (loads[e] / copies[e], -e))
        copies[heaviest] += 1
    items = sorted((loads[e] / copies[e] for e in range(len(loads)) for _ in range(copies[e])), reverse=True)
    ranks: list[list[float]] = [[] for _ in range(num_ranks)]
    for item in items:
        min((rank for rank in ranks if len(rank) < num_slots), key=sum).append(item)
    return [sum(rank) for rank in ranks]


def published_nodes(loads: list[float], num_groups: int, num_nodes: int) -> list[list[float]]:
    """The loads of each node's experts: groups of experts by balanced packing."""
    size = len(loads) // num_groups
    groups = sorted((loads[g * size : (g + 1) * size] for g in range(num_groups)), key=sum, reverse=True)
    nodes: list[list[float]] = [[] for _ in range(num_nodes)]
    for group in groups:
        min((node for node in nodes if len(node) < len(loads) // num_nodes), key=sum).extend(group)
    return nodes


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    num_ranks, num_slots = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    num_experts = draw(st.integers(1, num_ranks * num_slots))
    seed, skew = draw(st.integers(0, 10_000)), draw(st.sampled_from([0.0, 1.0, 3.0]))
    rng = np.random.default_rng(seed)
    loads = np.floor(1000 * rng.random((2, num_experts)) ** (1 + skew * 3))
    if draw(st.booleans()):
        loads[0] = 0.0
    return dict(loads=loads, num_ranks=num_ranks, num_slots=num_slots)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_properties(case: dict[str, Any]) -> None:
    loads, num_ranks, num_slots = case["loads"], case["num_ranks"], case["num_slots"]
    num_experts = loads.shape[1]
    placement = place_experts(loads, [3, 5], num_ranks=num_ranks, num_slots=num_slots)
    check_placement(placement, "here")  # every expert is somewhere, and its shares sum to 1
    for layer in placement.experts.tolist():
        for held in layer:
            assert len(set(held)) == min(num_slots, num_experts), "an expert is twice on a rank without need"
    found = placement.rank_loads(loads).max(1)
    for idx in range(2):
        weights = loads[idx] if loads[idx].sum() else np.ones(num_experts)
        greedy = max(published_greedy(weights.tolist(), num_ranks, num_slots))
        if loads[idx].sum():
            assert found[idx] <= greedy * (1 + 1e-6) + 1e-6


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.sampled_from([(2, 2), (4, 2), (4, 4), (6, 3), (8, 2)]), st.integers(1, 3))
def test_groups_stay_on_a_node(seed: int, shape: tuple[int, int], spare: int) -> None:
    num_ranks, num_nodes = shape
    num_groups, num_experts = 2 * num_nodes, 8 * num_nodes
    num_slots = num_experts // num_ranks + spare
    loads = np.random.default_rng(seed).random((1, num_experts)) ** 4
    placement = place_experts(
        loads, [1], num_ranks=num_ranks, num_slots=num_slots, num_nodes=num_nodes, num_groups=num_groups
    )
    check_placement(placement, "here")
    per_node = num_ranks // num_nodes
    for held in placement.experts[0].tolist():
        assert len(set(held)) == num_slots, "an expert is twice on a rank without need"
    nodes = published_nodes(loads[0].tolist(), num_groups, num_nodes)
    greedy = max(max(published_greedy(node, per_node, num_slots)) for node in nodes)
    assert placement.rank_loads(loads).max() <= greedy * (1 + 1e-6)
    if num_slots > num_experts // num_nodes:
        return  # a node has room for experts of others
    for begin in range(0, num_experts, num_experts // num_groups):
        group = range(begin, begin + num_experts // num_groups)
        found = {int(rank) // per_node for e in group for rank in np.flatnonzero(placement.holds()[0, e])}
        assert len(found) == 1, f"group of experts {group} on nodes {found}"


def test_greedy_is_the_published_method() -> None:
    """Guards the reference itself: both implementations agree on the loads of ranks."""
    rng = np.random.default_rng(5)
    for _ in range(30):
        num_ranks, num_slots = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        loads = rng.random(int(rng.integers(1, num_ranks * num_slots + 1)))
        slots = greedy_slots(loads, num_ranks, num_slots)
        counts = np.bincount([e for rank in slots for e in rank], minlength=len(loads))
        found = sorted(sum(loads[e] / counts[e] for e in rank) for rank in slots)
        assert found == pytest.approx(sorted(published_greedy(loads.tolist(), num_ranks, num_slots)))


def test_a_hot_expert_is_replicated_and_shared() -> None:
    loads = np.array([[100.0, 1, 1, 1, 1, 1, 1, 1]])
    placement = place_experts(loads, [0], num_ranks=4, num_slots=3)
    assert int(placement.holds()[0, 0].sum()) == 4
    assert imbalance(placement, loads)[0] < 1.01
    alone = place_experts(loads, [0], num_ranks=4, num_slots=2)
    assert imbalance(alone, loads)[0] > 3, "without replicas there is no help"


def test_experts_stay_where_they_are() -> None:
    rng = np.random.default_rng(0)
    loads = rng.random((3, 32)) ** 4
    first = place_experts(loads, [0, 1, 2], num_ranks=4, num_slots=10)
    same = place_experts(loads, [0, 1, 2], num_ranks=4, num_slots=10, old=first, min_gain=0.01)
    assert same.same_as(first)
    nearly = loads * (1 + 0.05 * rng.random(loads.shape))
    moved = place_experts(nearly, [0, 1, 2], num_ranks=4, num_slots=10, old=first)
    fresh = place_experts(nearly, [0, 1, 2], num_ranks=4, num_slots=10)

    def changes(placement: Placement) -> int:
        return int((placement.holds() & ~first.holds()).sum())

    assert changes(moved) <= changes(fresh)
    kept = (moved.experts == first.experts).mean()
    assert kept > 0.3, kept
    held = moved.holds() & first.holds()
    stays = [(layer, e, r) for layer, e, r in zip(*np.nonzero(held), strict=True)]
    for layer, expert, rank in stays:
        old_slot, new_slot = ((p.experts[layer, rank] == expert).argmax() for p in (first, moved))
        assert old_slot == new_slot, "an expert that stays keeps its slot"


def test_a_layer_without_load_is_left_alone() -> None:
    first = place_experts(np.ones((2, 8)), [0, 1], num_ranks=2, num_slots=5)
    loads = np.stack((np.zeros(8), np.arange(8.0) ** 3))
    second = place_experts(loads, [0, 1], num_ranks=2, num_slots=5, old=first)
    assert (second.experts[0] == first.experts[0]).all()
    assert imbalance(second, loads)[0] == 1.0
    assert imbalance(second, loads)[1] <= imbalance(first, loads)[1]


@pytest.mark.parametrize(("num_experts", "num_ranks", "num_slots"), [(8, 2, 4), (8, 3, 3), (10, 4, 5), (3, 2, 3)])
def test_initial_placement(num_experts: int, num_ranks: int, num_slots: int) -> None:
    placement = initial_placement([1, 2], num_experts, num_ranks, num_slots)
    check_placement(placement, "here")
    assert placement.experts.shape == (2, num_ranks, num_slots)
    for held in placement.experts[0].tolist():
        assert len(set(held)) == num_slots
    if num_ranks * num_slots == num_experts:
        assert placement.experts[0].reshape(-1).tolist() == list(range(num_experts))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((16, 1, 2), r"redundant_experts = 1: 16 \+ 1 experts do not divide by the 2 ranks of dp x tp; 0 or 2 would"),
        ((16, 0, 3), r"redundant_experts = 0: 16 \+ 0 .* 3 ranks of dp x tp; 2 or 5 would"),
        ((16, 18, 2), "redundant_experts = 18: with 16 each of 2 ranks holds all 16 experts"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_counts(*counts)
    assert check_counts(16, 2, 3) == 6


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.floats(0, 200))
def test_filling_up_to_one_level(base: list[float], amount: float) -> None:
    parts = fill_level(np.array(base), amount)
    assert parts.min() >= 0
    assert parts.sum() == pytest.approx(amount)
    filled = np.array(base) + parts
    if amount > 1e-6:
        level = filled[parts > 1e-9].max()
        assert filled[parts > 1e-9] == pytest.approx(level), "what was filled is level"
        assert (filled >= level - 1e-6).all(), "nothing is left below it"


def test_levelling_reaches_the_optimum_over_a_chain() -> None:
    """Expert a may be on ranks 0 and 1, b on 1 and 2: the load of rank 0 must travel through both."""
    parts = np.array([[0.0, 6.0, 0.0], [0.0, 6.0, 0.0], [0.0, 0.0, 0.0]])
    holds = np.array([[True, True, False], [False, True, True], [True, False, False]])
    level_parts(parts, holds, sweeps=60)
    assert parts.sum(0) == pytest.approx([4.0, 4.0, 4.0], abs=1e-3)
