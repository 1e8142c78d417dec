"""How the load of replicated experts is divided over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe.packing import FloatArray

SETTLED = 1e-6  # of a rank's load: what still moves is not worth another sweep
SWEEPS = 12  # over all replicated experts; each leaves the largest load of a rank as it is or lowers it


def fill_level(base: FloatArray, amount: float) -> FloatArray:
    """[n] -> [n] non-negative parts of `amount` that raise the lowest of `base` to one level."""
    order = np.argsort(base, kind="stable")
    ordered = base[order]
    # With the i + 1 lowest filled the level is the mean of their sum and the amount; the right i is the last whose
    # level reaches its highest member.
    levels = (ordered.cumsum() + amount) / np.arange(1, len(base) + 1)
    last = int(np.flatnonzero(levels >= ordered)[-1]) if amount > 0 else 0
    parts = np.zeros(len(base))
    parts[order[: last + 1]] = np.maximum(levels[last] - ordered[: last + 1], 0.0)
    total = parts.sum()
    return parts * (amount / total) if total > 0 else np.full(len(base), amount / len(base))


def level_parts(
    parts: FloatArray, holds: NDArray[np.bool_], sweeps: int = SWEEPS, only: Sequence[int] | None = None
) -> None:
    """Divide each expert's load anew over its ranks until the ranks are as even as their experts allow; in place.

    parts: [num_experts, num_ranks] load of an expert on a rank; holds: the same, bool; only: experts to divide anew.
    One expert at a time fills up the least loaded of its ranks: the sum of squares falls with every change, and no rank
    rises above the highest.
    """
    totals = parts.sum(0)  # [num_ranks]
    experts = range(len(parts)) if only is None else only
    shared = [(e, ranks) for e in experts if len(ranks := np.flatnonzero(holds[e])) > 1]
    for _ in range(sweeps):
        moved = 0.0
        for expert, ranks in shared:
            amount = float(parts[expert, ranks].sum())
            if amount <= 0.0:
                continue
            base = totals[ranks] - parts[expert, ranks]
            filled = fill_level(base, amount)
            moved = max(moved, float(np.abs(filled - parts[expert, ranks]).max()))
            parts[expert, ranks], totals[ranks] = filled, base + filled
        if moved <= SETTLED * float(totals.mean()):
            return


def traffic(shares: FloatArray, ranks_per_node: int, rank: int) -> FloatArray:
    """Where `rank` sends the tokens of an expert so that its replicas get their shares, near ones first.

    shares: [n, num_ranks], rows summing to 1 -> [n, num_ranks (to)], rows summing to 1. All ranks are taken to have
    equally many tokens. Each keeps what its own replica's share allows, then the ranks of a node settle what is left
    among themselves, then all; every rank works out the same, and its own row of it.
    """
    num_rows, num_ranks = shares.shape
    sent = np.zeros((num_rows, num_ranks))
    demand, supply = shares.astype(np.float64), np.full((num_rows, num_ranks), 1.0 / num_ranks)
    own = np.minimum(demand, supply)
    sent[:, rank] = own[:, rank]
    demand, supply = demand - own, supply - own
    for size in (ranks_per_node, num_ranks):
        blocks = (num_rows, num_ranks // size, size)
        given, taken = supply.reshape(blocks), demand.reshape(blocks)
        total_given, total_taken = given.sum(2, keepdims=True), taken.sum(2, keepdims=True)
        amount = np.minimum(total_given, total_taken)  # [n, num_nodes, 1]
        give = _part(given * amount, total_given).reshape(shares.shape)
        take = _part(taken * amount, total_taken).reshape(shares.shape)
        node = rank // size
        near = slice(node * size, (node + 1) * size)
        sent[:, near] += give[:, rank : rank + 1] * _part(take[:, near], amount[:, node])
        demand, supply = demand - take, supply - give
    sent *= num_ranks
    return sent


def _part(values: FloatArray, of: FloatArray) -> FloatArray:
    """values / of, and 0 where `of` is nothing (to within rounding)."""
    some = of > 1e-15
    found: FloatArray = np.where(some, values / np.where(some, of, 1.0), 0.0)
    return found
