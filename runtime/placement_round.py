"""One re-placement on the controller's side: what has come in of it, what it came to, and what is worked out for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe.balance import place_experts
from moe.moves import Batch
from moe.placement import Placement
from runtime.models.config import ModelConfig
from runtime.placement_messages import Loads, Staged, held_of

Counts = NDArray[np.float64]
Fingerprints = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Rebalanced:
    """What a round came to. Imbalances: a layer's busiest rank over the mean, averaged over layers, by the loads seen.

    `error`: why everything stays as it was, in one line; empty: nothing went wrong.
    """

    round_id: int
    num_moved: int = 0  # experts that came to a rank which did not hold them
    imbalance_before: float = 1.0
    imbalance_after: float = 1.0
    elapsed_s: float = 0.0
    error: str = ""


@dataclass
class Round:
    """One re-placement from the question for loads to the change."""

    round_id: int
    min_gain: float
    began: float
    loads: dict[int, Loads] = field(default_factory=dict)  # by rank
    planner: threading.Thread | None = None
    new: Placement | None = None
    batches: Iterator[tuple[Batch, bool]] | None = None  # each with whether it is the last
    staged: dict[int, Staged] | None = None  # by rank, once they have been told to


def better_placement(
    model: ModelConfig, ranks_per_node: int, old: Placement, loads: Counts, min_gain: float
) -> Placement:
    """Pure: the placement that follows `old` under `loads` [num_layers, num_experts]."""
    return place_experts(
        loads, old.layers, num_ranks=old.num_ranks, num_slots=old.num_slots, num_nodes=old.num_ranks // ranks_per_node,
        num_groups=model.router.num_groups if model.router is not None else 1, old=old, min_gain=min_gain,
    )


def agreed_fingerprints(placement: Placement, ranks: Sequence[Loads]) -> Fingerprints:
    """[num_layers, num_experts] of what is held. Raises ValueError naming ranks whose weights of one expert differ."""
    shape = (len(placement.layers), placement.num_slots)
    found: Fingerprints = np.zeros((len(placement.layers), placement.num_experts), np.uint64)
    holder = np.full(found.shape, -1)
    for rank, loads in enumerate(ranks):
        held = held_of(loads, shape)
        for idx, slot in np.ndindex(*shape):
            expert = placement.experts[idx, rank, slot]
            first = int(holder[idx, expert])
            if first >= 0 and found[idx, expert] != held[idx, slot]:
                raise ValueError(
                    f"layer {placement.layers[idx]}, expert {expert}: rank {first} holds weights of checksum "
                    f"{int(found[idx, expert]):016x}, rank {rank} of {int(held[idx, slot]):016x}"
                )
            found[idx, expert], holder[idx, expert] = held[idx, slot], rank
    return found


def first_error(staged: Mapping[int, Staged]) -> str:
    return next((f"rank {rank}: {staged[rank].error}" for rank in sorted(staged) if staged[rank].error), "")


def with_last(batches: Sequence[Batch]) -> Iterator[tuple[Batch, bool]]:
    return ((batch, i == len(batches) - 1) for i, batch in enumerate(batches))
