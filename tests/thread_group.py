"""Ranks as threads of one process: collectives without processes, for tests of whatever takes a Group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from parallel.group import Pending, PendingRows, Waiting
from parallel.layout import Layout, RankGroups

T = TypeVar("T")
TIMEOUT_S = 60.0


@dataclass(eq=False)
class _Meeting:
    """Where the threads of one group put their inputs; call number n of every rank belongs together."""

    size: int
    lock: threading.Condition = field(default_factory=threading.Condition)
    calls: dict[int, dict[int, tuple[str, Any]]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    broken: bool = False


class ThreadGroup:
    """One rank's view. A mismatch of operations between ranks, or a rank that stays away, fails the call."""

    def __init__(self, name: str, rank: int, meeting: _Meeting) -> None:
        self.name, self.rank, self.size = name, rank, meeting.size
        self._meeting, self._count = meeting, 0

    def all_gather(self, x: Tensor) -> Pending:
        return self._start("all_gather", x, lambda inputs: torch.cat(inputs))

    def reduce_scatter(self, x: Tensor) -> Pending:
        def take(inputs: list[Tensor]) -> Tensor:
            total = inputs[0].clone()
            for other in inputs[1:]:
                total += other
            return total.chunk(self.size)[self.rank] if len(total) else total

        assert x.shape[0] % self.size == 0
        return self._start("reduce_scatter", x, take)

    def all_to_all(self, x: Tensor) -> Pending:
        assert x.shape[0] % self.size == 0
        n = x.shape[0] // self.size
        here = slice(self.rank * n, (self.rank + 1) * n)
        return self._start("all_to_all", x, lambda inputs: torch.cat([other[here] for other in inputs]))

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        assert x.shape[0] == sum(send)

        def take(inputs: list[tuple[Tensor, Sequence[int]]]) -> Tensor:
            parts = [torch.split(rows, list(counts))[self.rank] for rows, counts in inputs]
            assert [len(part) for part in parts] == list(receive), "receive counts do not match what was sent"
            return torch.cat(parts)

        return self._start("all_to_all_uneven", (x, list(send)), take)

    def all_to_all_sized(self, x: Tensor, send: Sequence[int], most: int) -> PendingRows:
        assert x.shape[0] == sum(send)
        assert max(send) <= most

        def take(inputs: list[tuple[Tensor, Sequence[int]]]) -> tuple[Tensor, list[int]]:
            parts = [torch.split(rows, list(counts))[self.rank] for rows, counts in inputs]
            return torch.cat(parts), [len(part) for part in parts]

        return self._start("all_to_all_sized", (x, list(send)), take)

    def _start(self, operation: str, value: Any, take: Callable[[list[Any]], T]) -> Waiting[T]:
        call, self._count = self._count, self._count + 1
        value = (value[0].clone(), value[1]) if isinstance(value, tuple) else value.clone()
        with self._meeting.lock:
            self._meeting.calls.setdefault(call, {})[self.rank] = (operation, value)
            self._meeting.lock.notify_all()
        return _Meet(self._meeting, call, operation, take)


class _Meet(Generic[T]):
    def __init__(self, meeting: _Meeting, call: int, operation: str, take: Callable[[list[Any]], T]) -> None:
        self._meeting, self._call, self._operation, self._take = meeting, call, operation, take
        self._results: list[T] = []

    def wait(self) -> T:
        if not self._results:
            self._results.append(self._take(self._inputs()))
        return self._results[0]

    def _inputs(self) -> list[Any]:
        meeting, call = self._meeting, self._call
        with meeting.lock:
            meeting.lock.wait_for(lambda: meeting.broken or len(meeting.calls[call]) == meeting.size, TIMEOUT_S)
            arrived = meeting.calls[call]
            if meeting.broken or len(arrived) != meeting.size:
                raise RuntimeError(f"call {call} ({self._operation}): only ranks {sorted(arrived)} came")
            operations = {operation for operation, _ in arrived.values()}
            if operations != {self._operation}:
                raise RuntimeError(f"call {call}: ranks disagree: {sorted(operations)}")
            inputs = [arrived[rank][1] for rank in range(meeting.size)]
            meeting.taken[call] = meeting.taken.get(call, 0) + 1
            if meeting.taken[call] == meeting.size:
                del meeting.calls[call], meeting.taken[call]
        return inputs


def run_ranks(layout: Layout, work: Callable[[int, RankGroups], T]) -> list[T]:
    """`work(rank, groups)` on one thread for each rank of `layout`; results in rank order. A failure ends all ranks."""
    ep = _Meeting(layout.ep)
    tp = [_Meeting(layout.tp) for _ in range(layout.dp)]

    def one(rank: int) -> T:
        groups = RankGroups(
            tp=ThreadGroup("tp", layout.tp_rank(rank), tp[layout.dp_rank(rank)]), ep=ThreadGroup("ep", rank, ep)
        )
        try:
            with torch.inference_mode():
                return work(rank, groups)
        except BaseException:
            for meeting in (ep, *tp):
                with meeting.lock:
                    meeting.broken = True
                    meeting.lock.notify_all()
            raise

    with ThreadPoolExecutor(layout.ep) as pool:
        futures = [pool.submit(one, rank) for rank in range(layout.ep)]
    errors = [f.exception() for f in futures]
    own = [e for e in errors if e is not None and "only ranks" not in str(e)] or [e for e in errors if e is not None]
    if own:
        raise own[0]
    return [f.result() for f in futures]
