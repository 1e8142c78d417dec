"""What controller and ranks say to each other about experts: loads, a placement to come, weights, the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moe.moves import Batch, Move
from moe.placement import Placement, check_placement


@dataclass(frozen=True, kw_only=True)
class AskLoads:
    """controller -> rank: tell what the experts were asked for since the last time, and what is held here."""

    round_id: int


@dataclass(frozen=True, kw_only=True)
class Loads:
    """rank -> controller. `counts`: int64 [num_layers, num_experts] routes of this rank's own tokens; dummies are none.

    `fingerprints`: uint64 [num_layers, num_slots] of the weights in this rank's slots.
    """

    round_id: int
    counts: bytes
    fingerprints: bytes


@dataclass(frozen=True, kw_only=True)
class Stage:
    """controller -> rank: have the experts of this placement at hand, beside those in use.

    `source`: "files", each rank reads what it lacks; "ranks", they come with `MoveWeights`. `fingerprints`: uint64
    [num_layers, num_experts], what the weights must come to; empty: unknown.
    """

    round_id: int
    source: str
    layers: Sequence[int]
    num_experts: int
    num_ranks: int
    num_slots: int
    ranks_per_node: int  # whose replicas are near
    experts: bytes  # int32 [num_layers, num_ranks, num_slots]
    shares: bytes  # float32, the same
    fingerprints: bytes


@dataclass(frozen=True, kw_only=True)
class MoveWeights:
    """controller -> rank: one exchange of expert weights over all ranks, between two steps."""

    round_id: int
    moves: bytes  # int32 [num_moves, 4]: layer, expert, source, target
    begin: int  # which values of each expert
    end: int
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Staged:
    """rank -> controller: all is at hand, or in one line why not. `num_read`: experts that were not here before."""

    round_id: int
    num_read: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """controller -> rank: from the next step on use what was staged; or (not `commit`) forget it."""

    round_id: int
    commit: bool


T = TypeVar("T", bound=np.generic)

PlacementRequest = AskLoads | Stage | MoveWeights | Place
PlacementReply = Loads | Staged


def stage(
    round_id: int, placement: Placement, source: str, fingerprints: NDArray[np.uint64] | None, ranks_per_node: int
) -> Stage:
    return Stage(
        round_id=round_id, source=source, layers=list(placement.layers), num_experts=placement.num_experts,
        num_ranks=placement.num_ranks, num_slots=placement.num_slots, experts=placement.experts.tobytes(),
        shares=placement.shares.tobytes(), ranks_per_node=ranks_per_node,
        fingerprints=b"" if fingerprints is None else fingerprints.tobytes(),
    )


def placement_of(message: Stage) -> Placement:
    """Raises ValueError for sizes that do not match, or a placement without every expert."""
    shape = (len(message.layers), message.num_ranks, message.num_slots)
    placement = Placement(
        layers=tuple(message.layers), num_experts=message.num_experts,
        experts=_array(message.experts, np.int32, shape), shares=_array(message.shares, np.float32, shape),
    )
    check_placement(placement, f"placement {message.round_id}")
    return placement


def fingerprints_of(message: Stage) -> NDArray[np.uint64] | None:
    """[num_layers, num_experts], or None where they are unknown."""
    if not message.fingerprints:
        return None
    return _array(message.fingerprints, np.uint64, (len(message.layers), message.num_experts))


def counts_of(message: Loads, shape: tuple[int, int]) -> NDArray[np.int64]:
    return _array(message.counts, np.int64, shape)


def held_of(message: Loads, shape: tuple[int, int]) -> NDArray[np.uint64]:
    return _array(message.fingerprints, np.uint64, shape)


def move_weights(round_id: int, batch: Batch, *, is_last: bool) -> MoveWeights:
    rows = [(m.layer, m.expert, m.source, m.target) for m in batch.moves]
    return MoveWeights(
        round_id=round_id, moves=np.array(rows, np.int32).tobytes(), begin=batch.begin, end=batch.end, is_last=is_last
    )


def batch_of(message: MoveWeights) -> Batch:
    rows = _array(message.moves, np.int32, (len(message.moves) // 16, 4)).tolist()
    return Batch(tuple(Move(*row) for row in rows), message.begin, message.end)


def _array(data: bytes, dtype: type[T], shape: tuple[int, ...]) -> NDArray[T]:
    expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if len(data) != expected:
        raise ValueError(f"array of {len(data)} bytes: expected {expected} for shape {shape}")
    return np.frombuffer(data, dtype).reshape(shape)
