"""How many replicas each expert gets and which rank holds them: greedy replication and balanced packing.

The published method (EPLB, https://github.com/deepseek-ai/EPLB) written out for one layer: the next replica goes to the
expert with the most load a replica; the heaviest item goes to the lightest pack that has room. With several nodes the
router's groups are packed onto nodes first, so that a token of few groups travels to few nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def replicate(loads: FloatArray, num_physical: int, most: int | None = None) -> IntArray:
    """[num_experts] loads -> [num_experts] replicas, `num_physical` in all, of no expert more than `most`."""
    counts = np.ones(len(loads), np.int64)
    for _ in range(num_physical - len(loads)):
        each = loads / counts
        if most is not None:
            each = np.where(counts < most, each, -1.0)
        counts[int(each.argmax())] += 1
    return counts


def pack(loads: FloatArray, num_packs: int) -> IntArray:
    """[n] loads -> [n] packs, n / num_packs items in each."""
    room = np.full(num_packs, len(loads) // num_packs)
    assert int(room.sum()) == len(loads), (len(loads), num_packs)
    totals, packs = np.zeros(num_packs), np.empty(len(loads), np.int64)
    for item in np.argsort(-loads, kind="stable").tolist():
        best = int(np.where(room > 0, totals, np.inf).argmin())
        packs[item], room[best], totals[best] = best, room[best] - 1, totals[best] + loads[item]
    return packs


def greedy_slots(loads: FloatArray, num_ranks: int, num_slots: int) -> list[list[int]]:
    """The published method on one node: the experts of each rank; one may appear twice on a rank."""
    counts = replicate(loads, num_ranks * num_slots)
    experts = np.repeat(np.arange(len(loads)), counts)
    return by_rank(experts, pack((loads / counts)[experts], num_ranks), num_ranks)


def distinct_slots(loads: FloatArray, num_ranks: int, num_slots: int) -> list[list[int]]:
    """The same aims, but a rank takes an expert only once; ranks may be left with free slots."""
    counts = replicate(loads, num_ranks * num_slots, num_ranks)
    each = loads / counts
    totals = np.zeros(num_ranks)
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    # Of equal loads the more often replicated first: they have the fewest ranks to choose from.
    for expert in np.lexsort((-counts, -each)).tolist():
        for _ in range(int(counts[expert])):
            open_ranks = [r for r in range(num_ranks) if len(slots[r]) < num_slots and expert not in slots[r]]
            if not open_ranks:
                break
            rank = min(open_ranks, key=lambda r: (totals[r], r))
            slots[rank].append(expert)
            totals[rank] += each[expert]
    return slots


def groups_of_nodes(loads: FloatArray, num_groups: int, num_nodes: int) -> list[IntArray]:
    """The experts of each node: whole groups of the router, packed by their load."""
    size = len(loads) // num_groups
    nodes = pack(loads.reshape(num_groups, size).sum(1), num_nodes)
    return [np.flatnonzero(np.repeat(nodes == node, size)) for node in range(num_nodes)]


def by_rank(experts: IntArray, ranks: IntArray, num_ranks: int) -> list[list[int]]:
    return [experts[ranks == rank].tolist() for rank in range(num_ranks)]


def is_complete(slots: Sequence[Sequence[int]], experts: Sequence[int]) -> bool:
    """Whether every one of `experts` has a place."""
    return set(experts) <= {expert for rank in slots for expert in rank}
