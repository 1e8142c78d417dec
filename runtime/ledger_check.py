"""Debug mode: compares what the ranks say of their collectives, step by step."""

from __future__ import annotations

from collections.abc import Mapping

from parallel.layout import Layout


class LedgerCheck:
    """Collects one page from each rank for each step; all ranks must agree on ep, those of a dp group on tp."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pages: dict[int, dict[int, Mapping[str, int]]] = {}
        self.num_compared = 0  # steps

    def add(self, rank: int, step_id: int, digests: Mapping[str, int]) -> str | None:
        """None, or one line on how the ranks differ once the last page of a step is in."""
        pages = self._pages.setdefault(step_id, {})
        pages[rank] = digests
        if len(pages) < self._layout.ep:
            return None
        del self._pages[step_id]
        self.num_compared += 1
        for rank in range(self._layout.ep):
            leader = rank - self._layout.tp_rank(rank)
            for axis, other in (("ep", 0), ("tp", leader)):
                if pages[rank].get(axis) != pages[other].get(axis):
                    return f"rank {rank} made other collectives on {axis} than rank {other} in step {step_id}"
        return None
