"""Who sends which expert to whom when a placement follows another, and in which pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moe.placement import Placement


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """Rank `source` holds the expert and gives it to rank `target`, which does not."""

    layer: int  # the model's number
    expert: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Values `begin .. end - 1` of each moved expert, in one exchange over all ranks."""

    moves: tuple[Move, ...]  # in order of target, then of layer and expert, so that all ranks see the same order
    begin: int
    end: int


def plan_moves(old: Placement, new: Placement, ranks_per_node: int) -> list[Move]:
    """Every expert that a rank holds in `new` and not in `old`, from a holder: on its node if possible, the least
    busy one first."""
    assert old.layers == new.layers, (old.layers, new.layers)
    had = old.holds()
    sends = np.zeros(old.num_ranks, np.int64)
    moves = []
    for idx, layer in enumerate(new.layers):
        for target, held in enumerate(new.experts[idx].tolist()):
            for expert in dict.fromkeys(held):
                holders = np.flatnonzero(had[idx, expert]).tolist()
                if target in holders:
                    continue
                node = target // ranks_per_node
                source = min(holders, key=lambda r: (r // ranks_per_node != node, sends[r], r))
                sends[source] += 1
                moves.append(Move(layer, expert, source, target))
    return moves


def in_batches(moves: Sequence[Move], num_values: int, most_values: int) -> Iterator[Batch]:
    """Cut moves of experts of `num_values` values into exchanges in which no rank sends more than `most_values`, and
    none gets more: many may send to one, which needs memory for all of it."""
    per_rank = max(most_values // num_values, 1)
    left = list(moves)
    while left:
        sent: Counter[int] = Counter()
        got: Counter[int] = Counter()
        now: list[Move] = []
        later: list[Move] = []
        for move in left:
            if sent[move.source] == per_rank or got[move.target] == per_rank:
                later.append(move)
                continue
            now.append(move)
            sent[move.source] += 1
            got[move.target] += 1
        now.sort(key=lambda m: (m.target, m.layer, m.expert))
        for begin in range(0, num_values, most_values):
            yield Batch(tuple(now), begin, min(begin + most_values, num_values))
        left = later
