"""Collectives over one axis of ranks, as a small protocol: processes with torch.distributed, or a single rank alone.

Every call starts an operation and returns at once; `wait` gives the result. All ranks of a group make the same calls in
the same order, with zero rows too. Inputs must not be changed before `wait` has returned.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.abort import AbortSignal

SLICE_S = 0.05  # of waiting, where a wait may be called off

Result = TypeVar("Result", covariant=True)


class Waiting(Protocol[Result]):
    """An operation under way."""

    def wait(self) -> Result: ...


Pending = Waiting[Tensor]
PendingRows = Waiting[tuple[Tensor, list[int]]]
"""An exchange whose sizes come with it: [n, ...] in rank order, and how many of the n rows came from each rank."""


class Group(Protocol):
    """Ranks `0 .. size - 1` along one axis; `rank` is this process's place."""

    name: str
    rank: int
    size: int

    def all_gather(self, x: Tensor) -> Pending:
        """[n, ...], n equal on all ranks -> [size * n, ...] in rank order."""
        ...

    def reduce_scatter(self, x: Tensor) -> Pending:
        """[size * n, ...] -> [n, ...]: this rank's block of the sum over ranks."""
        ...

    def all_to_all(self, x: Tensor) -> Pending:
        """[size * n, ...] -> [size * n, ...]: block j goes to rank j, block i of the result came from rank i."""
        ...

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """[sum(send), ...] -> [sum(receive), ...]: send[j] rows for rank j, receive[i] rows from rank i, in order."""
        ...

    def all_to_all_sized(self, x: Tensor, send: Sequence[int], most: int) -> PendingRows:
        """[sum(send), ...] -> the rows for this rank: send[j] rows for rank j, which learns of their number with them.

        No rank sends more than `most` rows to another, a number that all ranks agree on. One exchange, where asking
        for the numbers first takes two; a back end may send `most` rows all the same.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ready:
    """A result that nobody has to wait for."""

    result: Tensor

    def wait(self) -> Tensor:
        return self.result


@dataclass(frozen=True, slots=True)
class ReadyRows:
    """Rows that nobody has to wait for."""

    rows: Tensor
    counts: list[int]

    def wait(self) -> tuple[Tensor, list[int]]:
        return self.rows, self.counts


class SoloGroup:
    """The only rank of its axis: every operation is the identity."""

    rank, size = 0, 1

    def __init__(self, name: str) -> None:
        self.name = name

    def all_gather(self, x: Tensor) -> Pending:
        return Ready(x)

    def reduce_scatter(self, x: Tensor) -> Pending:
        return Ready(x)

    def all_to_all(self, x: Tensor) -> Pending:
        return Ready(x)

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return Ready(x)

    def all_to_all_sized(self, x: Tensor, send: Sequence[int], most: int) -> PendingRows:
        return ReadyRows(x, list(send))


class ProcessGroup:
    """One process for each rank, over a torch.distributed group (gloo or NCCL). `abort` calls waits of the host off."""

    def __init__(self, name: str, group: dist.ProcessGroup, abort: AbortSignal | None = None) -> None:
        self.name = name
        self.rank, self.size = group.rank(), group.size()
        self._group, self._abort = group, abort

    def release(self) -> dist.ProcessGroup:
        """The group inside, for whoever ends it; this one can do nothing more."""
        group = self._group
        del self._group
        return group

    def all_gather(self, x: Tensor) -> Pending:
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        work = dist.all_gather_into_tensor(out, x.contiguous(), group=self._group, async_op=True)
        return _Work(work, out, self._abort)

    def reduce_scatter(self, x: Tensor) -> Pending:
        assert x.shape[0] % self.size == 0, (x.shape, self.size)
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        work = dist.reduce_scatter_tensor(out, x.contiguous(), group=self._group, async_op=True)
        return _Work(work, out, self._abort)

    def all_to_all(self, x: Tensor) -> Pending:
        assert x.shape[0] % self.size == 0, (x.shape, self.size)
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        return _Work(dist.all_to_all_single(out, x, group=self._group, async_op=True), out, self._abort)

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        assert x.shape[0] == sum(send), (x.shape, send)
        out = x.new_empty((sum(receive), *x.shape[1:]))
        work = dist.all_to_all_single(
            out, x.contiguous(), list(receive), list(send), group=self._group, async_op=True
        )
        return _Work(work, out, self._abort)

    def all_to_all_sized(self, x: Tensor, send: Sequence[int], most: int) -> PendingRows:
        # The library must know sizes beforehand: padding costs bytes, asking a second way through the network.
        assert x.shape[0] == sum(send), (x.shape, send)
        assert max(send) <= most < 1 << 24, (send, most)  # counts travel as values of x
        blocks = x.new_zeros((self.size, 1 + most, *x.shape[1:]))
        blocks.view(self.size, -1)[:, 0] = torch.tensor(send, dtype=x.dtype, device=x.device)
        for block, rows in zip(blocks, torch.split(x, list(send)), strict=True):
            block[1 : 1 + len(rows)] = rows
        return _Padded(self.all_to_all(blocks.flatten(0, 1)), self.size)


class _Padded:
    """Blocks of `1 + most` rows: how many of them count, and the rows."""

    __slots__ = ("_pending", "_result", "_size")

    def __init__(self, pending: Pending, size: int) -> None:
        self._pending, self._size = pending, size
        self._result: tuple[Tensor, list[int]] | None = None

    def wait(self) -> tuple[Tensor, list[int]]:
        if self._result is None:
            blocks = self._pending.wait()
            blocks = blocks.view(self._size, blocks.shape[0] // self._size, *blocks.shape[1:])  # [size, 1 + most, ...]
            counts = [int(count) for count in blocks[:, 0].reshape(self._size, -1)[:, 0].tolist()]
            rows = [block[1 : 1 + count] for block, count in zip(blocks, counts, strict=True)]
            self._result = torch.cat(rows), counts
        return self._result


class _Work:
    __slots__ = ("_abort", "_out", "_work")

    def __init__(self, work: dist.Work | None, out: Tensor, abort: AbortSignal | None) -> None:
        self._work, self._out, self._abort = work, out, abort

    def wait(self) -> Tensor:
        if self._work is not None:
            if self._abort is not None and self._out.device.type == "cpu":
                _wait_or_abort(self._work, self._abort)
            else:
                self._work.wait()  # on an accelerator its stream waits, not the host
            self._work = None
        return self._out


def _wait_or_abort(work: dist.Work, abort: AbortSignal) -> None:
    while True:
        abort.raise_if_set()
        begin = time.monotonic()
        try:
            work.wait(timedelta(seconds=SLICE_S))
        except RuntimeError:  # the slice is over, or the work failed: not every kind of work says that it ended
            if work.is_completed() or time.monotonic() < begin + 0.9 * SLICE_S:
                work.wait()
                return
        else:
            return
