"""From loads to a placement: replicate what is busy, pack evenly, divide what is replicated, move little."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe.packing import FloatArray, IntArray, distinct_slots, greedy_slots, groups_of_nodes, is_complete
from moe.placement import Placement
from moe.shares import level_parts

MAX_SWAPS = 32  # of two experts between the busiest rank of a layer and another
EVEN = 1.001  # busiest rank over the mean, at which a layer is left as it is
SWAP_GAIN = 1e-4  # of the busiest rank's load, below which a swap is not worth a move


def place_experts(
    loads: FloatArray, layers: Sequence[int], *, num_ranks: int, num_slots: int, num_nodes: int = 1,
    num_groups: int = 1, old: Placement | None = None, min_gain: float = 0.0,
) -> Placement:
    """loads: [num_layers, num_experts] tokens -> a placement over ranks of `num_slots` slots.

    Every expert has a place; no rank holds an expert twice unless there are more slots than experts. In every layer the
    busiest rank has no more than the published greedy method would give it. `num_groups`: of the router; where they
    divide by the nodes, a group stays on one node. With `old`, experts stay where they can, and a layer whose busiest
    rank would gain less than the fraction `min_gain` stays as it is.
    """
    num_experts = loads.shape[1]
    assert num_experts <= num_ranks * num_slots, (num_experts, num_ranks, num_slots)
    assert num_ranks % num_nodes == 0, (num_ranks, num_nodes)
    assert bool((loads >= 0).all()), "a load is negative or not a number"
    # A hierarchy exists only where whole groups, and their replicas, fill the nodes.
    by_node = num_nodes > 1 and num_groups > 1 and num_groups % num_nodes == 0
    blocks = num_nodes if by_node else 1
    found: list[tuple[IntArray, FloatArray]] = []
    for idx, layer_loads in enumerate(loads):
        before = None if old is None else (old.experts[idx].astype(np.int64), old.shares[idx].astype(np.float64))
        weights = layer_loads.astype(np.float64) if layer_loads.sum() > 0 else np.ones(num_experts)
        if before is not None and layer_loads.sum() <= 0:
            found.append(before)  # nothing is known of it: nothing to gain
            continue
        placed = _place_layer(weights, num_ranks, num_slots, blocks, num_groups)
        if before is not None:
            placed = _nearest(placed, before, blocks)
            if _busiest(*placed, weights) > (1 - min_gain) * _busiest(*before, weights):
                placed = before
        found.append(placed)
    return Placement(
        layers=tuple(layers), num_experts=num_experts,
        experts=np.stack([experts for experts, _ in found]).astype(np.int32),
        shares=np.stack([shares for _, shares in found]).astype(np.float32),
    )


def initial_placement(layers: Sequence[int], num_experts: int, num_ranks: int, num_slots: int) -> Placement:
    """Before any load is known: blocks in order of number, the spare slots filled by the experts of other ranks."""
    position = np.arange(num_ranks * num_slots)
    # Redundant slots are the last of each rank, so that the first ones do not depend on how many there are.
    own = np.array_split(np.arange(num_experts), num_ranks)
    slots = []
    following = 0
    for rank in range(num_ranks):
        held = own[rank].tolist()
        while len(held) < num_slots:
            if following % num_experts not in held or len(held) >= num_experts:
                held.append(following % num_experts)
            following += 1
        slots.append(held)
    assert sum(len(held) for held in slots) == len(position)
    experts = np.array(slots, np.int64)
    shares = _even_shares(experts, num_experts)
    return Placement(
        layers=tuple(layers), num_experts=num_experts,
        experts=np.repeat(experts[None], len(layers), 0).astype(np.int32),
        shares=np.repeat(shares[None], len(layers), 0).astype(np.float32),
    )


def _even_shares(experts: IntArray, num_experts: int) -> FloatArray:
    """[num_ranks, num_slots]: every rank that holds an expert serves as much of it."""
    holds = np.zeros((num_experts, len(experts)))
    holds[experts, np.arange(len(experts))[:, None]] = 1.0
    return _slot_shares(experts, holds / holds.sum(1, keepdims=True))


def _place_layer(
    loads: FloatArray, num_ranks: int, num_slots: int, num_blocks: int, num_groups: int
) -> tuple[IntArray, FloatArray]:
    if num_blocks == 1:
        return _place_block(loads, np.arange(len(loads)), num_ranks, num_slots)
    per_node = num_ranks // num_blocks
    nodes = groups_of_nodes(loads, num_groups, num_blocks)
    parts = [_place_block(loads[experts], experts, per_node, num_slots) for experts in nodes]
    experts, shares = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if any(len(set(held)) < num_slots for held in experts.tolist()):
        return _fill_up(experts, shares, loads)  # a node has more slots on a rank than experts
    return experts, shares


def _place_block(
    loads: FloatArray, names: IntArray, num_ranks: int, num_slots: int
) -> tuple[IntArray, FloatArray]:
    """The better of two beginnings, each improved. loads: [n] of the experts called `names`."""
    candidates = []
    for slots in (greedy_slots(loads, num_ranks, num_slots), distinct_slots(loads, num_ranks, num_slots)):
        if not is_complete(slots, range(len(loads))):
            continue
        experts, parts = _without_duplicates(slots, loads, num_slots)
        _improve(experts, parts)
        candidates.append((float(parts.sum(0).max()), experts, parts))
        if _is_even(parts.sum(0)):
            break
    _, experts, parts = min(candidates, key=lambda candidate: candidate[0])
    holds = _holds(experts, len(loads))
    return names[experts], _slot_shares(experts, _shares_of(parts, holds))


def _without_duplicates(
    slots: list[list[int]], loads: FloatArray, num_slots: int
) -> tuple[IntArray, FloatArray]:
    """Give a rank's second slot of one expert to another expert. No rank's load grows: the first slot takes it all.

    -> [num_ranks, num_slots] experts, [num_experts, num_ranks] load of each on each rank.
    """
    counts = np.zeros((len(loads), len(slots)))
    for rank, held in enumerate(slots):
        np.add.at(counts, (held, rank), 1)
    parts = loads[:, None] * counts / counts.sum(1, keepdims=True)
    holds = counts > 0
    filled = []
    for rank, held in enumerate(slots):
        filled.append(_fill_rank(list(dict.fromkeys(held)), rank, loads, holds, num_slots))
    level_parts(parts, holds)
    return np.array(filled, np.int64), parts


def _fill_up(experts: IntArray, shares: FloatArray, loads: FloatArray) -> tuple[IntArray, FloatArray]:
    """Give second slots of an expert on one rank to busy experts of other nodes, and divide the loads anew."""
    parts = np.zeros((len(loads), len(experts)))
    np.add.at(parts, (experts, np.arange(len(experts))[:, None]), loads[experts] * shares)
    holds = _holds(experts, len(loads))
    filled = []
    for rank, held in enumerate(experts.tolist()):
        filled.append(_fill_rank(list(dict.fromkeys(held)), rank, loads, holds, len(held)))
    level_parts(parts, holds)
    return np.array(filled, np.int64), _slot_shares(np.array(filled, np.int64), _shares_of(parts, holds))


def _fill_rank(kept: list[int], rank: int, loads: FloatArray, holds: NDArray[np.bool_], num_slots: int) -> list[int]:
    """`kept`, and the busiest experts that the rank has not, up to `num_slots`; `holds` grows with them."""
    while len(kept) < num_slots:
        absent = np.flatnonzero(~holds[:, rank])
        if not len(absent):  # more slots than experts
            kept.append(kept[len(kept) % len(loads)])
            continue
        best = absent[(loads / holds.sum(1))[absent].argmax()]
        holds[best, rank] = True
        kept.append(int(best))
    return kept


def _shares_of(parts: FloatArray, holds: NDArray[np.bool_]) -> FloatArray:
    """[num_experts, num_ranks] loads -> parts of 1; an expert without load is shared equally."""
    total = parts.sum(1, keepdims=True)
    return np.where(total > 0, parts / np.where(total > 0, total, 1.0), holds / holds.sum(1, keepdims=True))


def _improve(experts: IntArray, parts: FloatArray) -> None:
    """Swap experts between the busiest rank and another while that helps; in place."""
    for _ in range(MAX_SWAPS):
        totals = parts.sum(0)
        swap = None if _is_even(totals) else _best_swap(experts, parts, totals)
        if swap is None:
            return
        busy, slot, other, other_slot = swap
        mine, theirs = int(experts[busy, slot]), int(experts[other, other_slot])
        experts[busy, slot], experts[other, other_slot] = theirs, mine
        for expert, giver, taker in ((mine, busy, other), (theirs, other, busy)):
            parts[expert, taker], parts[expert, giver] = parts[expert, giver], 0.0
        touched = np.unique(experts[[busy, other]]).tolist()
        level_parts(parts, _holds(experts, len(parts)), sweeps=2, only=touched)


def _is_even(totals: FloatArray) -> bool:
    return bool(totals.max() <= EVEN * totals.mean())


def _best_swap(experts: IntArray, parts: FloatArray, totals: FloatArray) -> tuple[int, int, int, int] | None:
    """(busiest rank, its slot, other rank, its slot) that lowers the higher of both loads the most."""
    num_ranks, num_slots = experts.shape
    busy = int(totals.argmax())
    mine = parts[experts[busy], busy]  # [num_slots]
    theirs = parts[experts, np.arange(num_ranks)[:, None]]  # [num_ranks, num_slots]
    change = mine[None, :, None] - theirs[:, None, :]  # [num_ranks, my slot, their slot]
    higher = np.maximum(totals[busy] - change, totals[:, None, None] + change)
    holds = _holds(experts, len(parts))
    legal = ~holds[experts[busy]].T[:, :, None] & ~holds[experts, busy][:, None, :]
    higher = np.where(legal, higher, np.inf)
    best = int(higher.argmin())
    if higher.flat[best] >= totals[busy] * (1 - SWAP_GAIN):
        return None
    other, slot, other_slot = np.unravel_index(best, higher.shape)
    return busy, int(slot), int(other), int(other_slot)


def _holds(experts: IntArray, num_experts: int) -> NDArray[np.bool_]:
    """[num_ranks, num_slots] -> [num_experts, num_ranks]."""
    holds = np.zeros((num_experts, len(experts)), bool)
    holds[experts, np.arange(len(experts))[:, None]] = True
    return holds


def _slot_shares(experts: IntArray, shares: FloatArray) -> FloatArray:
    """[num_experts, num_ranks] shares -> [num_ranks, num_slots]; only the first slot of an expert on a rank has one."""
    found = shares[experts, np.arange(len(experts))[:, None]]
    for rank, held in enumerate(experts):
        first = np.zeros(len(held), bool)
        first[np.unique(held, return_index=True)[1]] = True
        found[rank] = np.where(first, found[rank], 0.0)
    return found


def _busiest(experts: IntArray, shares: FloatArray, loads: FloatArray) -> float:
    return float((loads[experts] * shares).sum(1).max())


def _nearest(
    placed: tuple[IntArray, FloatArray], before: tuple[IntArray, FloatArray], num_blocks: int
) -> tuple[IntArray, FloatArray]:
    """The same placement with ranks renamed, within nodes, and slots ordered so that most experts stay put."""
    experts, shares = placed
    old_experts = before[0]
    num_ranks = len(experts)
    overlap = np.array([[len(set(new) & set(old)) for old in old_experts.tolist()] for new in experts.tolist()])
    size = num_ranks // num_blocks
    target = np.empty(num_ranks, np.int64)
    for begin in range(0, num_ranks, size):
        block = overlap[begin : begin + size, begin : begin + size].astype(np.float64)
        for _ in range(size):
            new, old = np.unravel_index(int(block.argmax()), block.shape)
            target[begin + new] = begin + old
            block[new, :], block[:, old] = -1.0, -1.0
    moved_experts, moved_shares = np.empty_like(experts), np.empty_like(shares)
    moved_experts[target], moved_shares[target] = experts, shares
    for rank in range(num_ranks):
        order = _slot_order(moved_experts[rank].tolist(), old_experts[rank].tolist())
        moved_experts[rank], moved_shares[rank] = moved_experts[rank][order], moved_shares[rank][order]
    return moved_experts, moved_shares


def _slot_order(new: list[int], old: list[int]) -> list[int]:
    """Which entry of `new` each slot takes, so that an expert that was here keeps its slot."""
    order: list[int] = [-1] * len(new)
    left = list(range(len(new)))
    for slot, expert in enumerate(old):
        entry = next((i for i in left if new[i] == expert), None)
        if entry is not None:
            order[slot] = entry
            left.remove(entry)
    for slot, entry in enumerate(order):
        if entry < 0:
            order[slot] = left.pop(0)
    return order
