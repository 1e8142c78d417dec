"""Debug mode: every rank writes down each collective, so that ranks can be compared (design: lockstep rules)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from parallel.group import Group, Pending, PendingRows

Entry = tuple[int, int, str, str, tuple[int, ...]]  # step, half, group, operation, shape


@dataclass(slots=True)
class Ledger:
    """The collectives of one rank in order. `step` and `half` are set by whoever runs the step."""

    step: int = 0
    half: int = 0
    entries: list[Entry] = field(default_factory=list)

    def take_digests(self) -> dict[str, int]:
        """For each group, CRC-32 of its entries so far; then the ledger is as new, whatever was cut short before."""
        digests = {"tp": 0, "ep": 0}
        for entry in self.entries:
            digests[entry[2]] = zlib.crc32(repr(entry).encode(), digests.get(entry[2], 0))
        self.entries.clear()
        self.step = self.half = 0
        return digests


class LedgerGroup:
    """A group that notes each operation before it starts."""

    def __init__(self, group: Group, ledger: Ledger) -> None:
        self.name, self.rank, self.size = group.name, group.rank, group.size
        self._group, self._ledger = group, ledger

    def all_gather(self, x: Tensor) -> Pending:
        self._note("all_gather", x)
        return self._group.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Pending:
        self._note("reduce_scatter", x)
        return self._group.reduce_scatter(x)

    def all_to_all(self, x: Tensor) -> Pending:
        self._note("all_to_all", x)
        return self._group.all_to_all(x)

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        # Row counts differ between ranks by design; the shape of a row may not.
        self._ledger.entries.append(
            (self._ledger.step, self._ledger.half, self.name, "all_to_all_uneven", tuple(x.shape[1:]))
        )
        return self._group.all_to_all_uneven(x, send, receive)

    def all_to_all_sized(self, x: Tensor, send: Sequence[int], most: int) -> PendingRows:
        self._ledger.entries.append(
            (self._ledger.step, self._ledger.half, self.name, "all_to_all_sized", (most, *x.shape[1:]))
        )
        return self._group.all_to_all_sized(x, send, most)

    def _note(self, operation: str, x: Tensor) -> None:
        self._ledger.entries.append((self._ledger.step, self._ledger.half, self.name, operation, tuple(x.shape)))
