"""From experts to the slots that hold them: which replica a token takes, and how much each expert is asked for."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe.placement import Placement
from moe.router import Routing
from moe.shares import traffic

PERIOD = 60  # entries of a table row: divided by every number of replicas up to 6
# Share no factor with it: over neighbours every place of a row comes first, of two or three parts each in turn.
RANK_TURN, ROW_TURN = 37, 23


class ReplicaMap:
    """One layer's map on one rank: the token at position p of the rank's batch takes entry p % PERIOD of a row.

    table: [num_experts + 1, PERIOD] int64 slots, counted over all ranks; the last row stands for no expert.
    """

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._counts = torch.zeros(table.shape[0], dtype=torch.int64, device=table.device)
        self._positions, self._ones = torch.empty(0, 1), torch.empty(0)  # grow with the batch
        self._grow(PERIOD, 1)

    def __call__(self, routing: Routing) -> Routing:
        """Experts -> slots; what was asked for is counted, routes to no expert apart."""
        ids = routing.expert_ids  # [num_tokens, top_k]
        num_tokens = ids.shape[0]
        if ids.numel() > len(self._ones):
            self._grow(2 * num_tokens, ids.shape[1])
        # The quickest of several ways on the CPU: 3 us each for up to 64 tokens.
        self._counts.index_add_(0, ids.flatten(), self._ones[: ids.numel()])
        entries = torch.add(self._positions[:num_tokens], ids, alpha=PERIOD)
        return Routing(self._table.take(entries), routing.weights)

    def _grow(self, num_tokens: int, top_k: int) -> None:
        device = self._table.device
        self._positions = (torch.arange(num_tokens, device=device) % PERIOD).unsqueeze(1)
        self._ones = torch.ones(num_tokens * top_k, dtype=torch.int64, device=device)

    def use(self, table: Tensor) -> None:
        """Take another table from the next call on."""
        assert table.shape == self._table.shape, (table.shape, self._table.shape)
        self._table = table

    def take_counts(self) -> Tensor:
        """[num_experts] int64: routes of this rank's tokens since the last call."""
        counts = self._counts[:-1].clone()
        self._counts.zero_()
        return counts


def replica_table(placement: Placement, layer: int, rank: int, ranks_per_node: int) -> Tensor:
    """[num_experts + 1, PERIOD] int64 for `ReplicaMap` on `rank`: near replicas first, as far as the shares allow."""
    rows = traffic(placement.layer_shares(layer), ranks_per_node, rank)  # [num_experts, num_ranks]
    ranks = spread(rows, rank)  # [num_experts, PERIOD]
    slots = first_slots(placement.experts[placement.index(layer)], placement.num_experts)  # [num_experts, num_ranks]
    physical = ranks * placement.num_slots + np.take_along_axis(slots, ranks, 1)
    nowhere = np.full((1, PERIOD), placement.num_ranks * placement.num_slots)
    return torch.from_numpy(np.concatenate((physical, nowhere)))


def spread(rows: NDArray[np.float64], rank: int) -> NDArray[np.int64]:
    """[n, num_ranks] parts of 1 -> [n, PERIOD] ranks in these parts, evenly mixed, also over any few entries in a row.

    Small batches only ever see the first entries. So each row begins elsewhere, by its number and by `rank`: what a few
    entries favour then differs from expert to expert and from rank to rank.
    """
    credit = np.zeros_like(rows)
    taken = np.empty((len(rows), PERIOD), np.int64)
    here = np.arange(len(rows))
    for entry in range(PERIOD):
        credit += rows
        # Of equal credits the lowest rank; rounding must not break what is meant to be a tie.
        taken[:, entry] = np.round(credit, 9).argmax(1)
        credit[here, taken[:, entry]] -= 1.0
    begin = rank * RANK_TURN + here * ROW_TURN
    return np.take_along_axis(taken, (begin[:, None] + np.arange(PERIOD)) % PERIOD, 1)


def first_slots(experts: NDArray[np.int32], num_experts: int) -> NDArray[np.int64]:
    """[num_ranks, num_slots] -> [num_experts, num_ranks]: an expert's first slot on a rank; 0 where it has none."""
    num_ranks, num_slots = experts.shape
    slots = np.zeros((num_experts, num_ranks), np.int64)
    for slot in reversed(range(num_slots)):
        slots[experts[:, slot], np.arange(num_ranks)] = slot
    return slots
