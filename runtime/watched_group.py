"""A group that notes on the rank's vitals page which collective it waits for, and in its trace when it travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

from parallel.group import Group, Pending, PendingRows, Waiting
from parallel.layout import RankGroups
from parallel.trace import Exchange
from runtime.vitals import RankVitals, text_field

T = TypeVar("T")


class WatchedGroup:
    """Passes every call on. The note stays when a call raises: it then says where."""

    def __init__(self, group: Group, vitals: RankVitals) -> None:
        self.name, self.rank, self.size = group.name, group.rank, group.size
        self._group, self._vitals = group, vitals
        self._gather, self._scatter, self._even, self._uneven, self._sized = (
            _Note(f"{operation} on {group.name}")
            for operation in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_uneven", "all_to_all_sized")
        )

    def all_gather(self, x: Tensor) -> Pending:
        self._vitals.waiting(self._gather.field)
        return self._started(self._group.all_gather(x), self._gather)

    def reduce_scatter(self, x: Tensor) -> Pending:
        self._vitals.waiting(self._scatter.field)
        return self._started(self._group.reduce_scatter(x), self._scatter)

    def all_to_all(self, x: Tensor) -> Pending:
        self._vitals.waiting(self._even.field)
        return self._started(self._group.all_to_all(x), self._even)

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        self._vitals.waiting(self._uneven.field)
        return self._started(self._group.all_to_all_uneven(x, send, receive), self._uneven)

    def all_to_all_sized(self, x: Tensor, send: Sequence[int], most: int) -> PendingRows:
        self._vitals.waiting(self._sized.field)
        return self._started(self._group.all_to_all_sized(x, send, most), self._sized)

    def _started(self, pending: Waiting[T], note: _Note) -> Waiting[T]:
        self._vitals.waited()
        trace = self._vitals.trace
        if trace.on:
            pending = _Traced(pending, trace.exchange(note.text))
        return _Watched(pending, note.field, self._vitals)


class _Note:
    __slots__ = ("field", "text")

    def __init__(self, text: str) -> None:
        self.text, self.field = text, text_field(text)


class _Watched(Generic[T]):
    __slots__ = ("_field", "_pending", "_vitals")

    def __init__(self, pending: Waiting[T], field: bytes, vitals: RankVitals) -> None:
        self._pending, self._field, self._vitals = pending, field, vitals

    def wait(self) -> T:
        self._vitals.waiting(self._field)
        result = self._pending.wait()
        self._vitals.waited()
        return result


class _Traced(Generic[T]):
    __slots__ = ("_exchange", "_pending")

    def __init__(self, pending: Waiting[T], exchange: Exchange) -> None:
        self._pending, self._exchange = pending, exchange

    def wait(self) -> T:
        self._exchange.waiting()
        result = self._pending.wait()
        self._exchange.arrived()
        return result


def watch_groups(groups: RankGroups, vitals: RankVitals) -> RankGroups:
    """Both groups, watched where they have more than one rank, and the rank's trace."""
    tp, ep = (WatchedGroup(g, vitals) if g.size > 1 else g for g in (groups.tp, groups.ep))
    return RankGroups(tp=tp, ep=ep, trace=vitals.trace)
