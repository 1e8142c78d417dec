"""How the load of replicated experts is divided over the ranks that hold them."""

from __future__ import annotations

import numpy as np

from moe.packing import FloatArray

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


def level_parts(parts: FloatArray, holds: np.ndarray, sweeps: int = SWEEPS) -> None:
    """Divide each expert's load anew over its ranks until the ranks are as even as their experts allow; in place.

    parts: [num_experts, num_ranks] load of an expert on a rank; holds: the same, bool. One expert at a time fills up
    the least loaded of its ranks: the sum of squares falls with every change, and no rank rises above the highest.
    """
    totals = parts.sum(0)  # [num_ranks]
    shared = [(e, np.flatnonzero(holds[e])) for e in np.flatnonzero(holds.sum(1) > 1)]
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
        if moved <= 1e-9 * float(totals.sum()):
            return


def traffic(shares: FloatArray, ranks_per_node: int) -> FloatArray:
    """Where each rank sends the tokens of an expert so that its replicas get their shares, near ones first.

    shares: [n, num_ranks], rows summing to 1 -> [n, num_ranks (from), num_ranks (to)], every [n, from] summing to 1.
    All ranks are taken to have equally many tokens. A rank keeps what its own replica's share allows, then the ranks
    of a node settle what is left among themselves, then all.
    """
    num_rows, num_ranks = shares.shape
    here = np.arange(num_ranks)
    sent = np.zeros((num_rows, num_ranks, num_ranks))
    demand, supply = shares.astype(np.float64).copy(), np.full((num_rows, num_ranks), 1.0 / num_ranks)
    own = np.minimum(demand, supply)
    sent[:, here, here] = own
    demand, supply = demand - own, supply - own
    for size in (ranks_per_node, num_ranks):
        blocks = (num_rows, num_ranks // size, size)
        given, taken = supply.reshape(blocks), demand.reshape(blocks)
        total_given, total_taken = given.sum(2, keepdims=True), taken.sum(2, keepdims=True)
        amount = np.minimum(total_given, total_taken)  # [n, num_nodes, 1]
        give = given * np.divide(amount, total_given, where=total_given > 0, out=np.zeros_like(amount))
        take = taken * np.divide(amount, total_taken, where=total_taken > 0, out=np.zeros_like(amount))
        part = np.divide(take, amount, where=amount > 0, out=np.zeros_like(take))
        for block in range(blocks[1]):
            ranks = slice(block * size, (block + 1) * size)
            sent[:, ranks, ranks] += give[:, block, :, None] * part[:, block, None, :]
        demand, supply = demand - take.reshape(shares.shape), supply - give.reshape(shares.shape)
    sent *= num_ranks
    return sent
