"""Collectives over one axis of ranks, as a small protocol: processes with torch.distributed, or a single rank alone.

Every call starts an operation and returns at once; `wait` gives the result. All ranks of a group make the same calls in
the same order, with zero rows too. Inputs must not be changed before `wait` has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> Tensor: ...


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


@dataclass(frozen=True, slots=True)
class Ready:
    """A result that nobody has to wait for."""

    result: Tensor

    def wait(self) -> Tensor:
        return self.result


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


class ProcessGroup:
    """One process for each rank, over a torch.distributed group (gloo or NCCL)."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name = name
        self.rank, self.size = group.rank(), group.size()
        self._group = group

    def all_gather(self, x: Tensor) -> Pending:
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return _Work(dist.all_gather_into_tensor(out, x.contiguous(), group=self._group, async_op=True), out)

    def reduce_scatter(self, x: Tensor) -> Pending:
        assert x.shape[0] % self.size == 0, (x.shape, self.size)
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return _Work(dist.reduce_scatter_tensor(out, x.contiguous(), group=self._group, async_op=True), out)

    def all_to_all(self, x: Tensor) -> Pending:
        assert x.shape[0] % self.size == 0, (x.shape, self.size)
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        return _Work(dist.all_to_all_single(out, x, group=self._group, async_op=True), out)

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        assert x.shape[0] == sum(send), (x.shape, send)
        out = x.new_empty((sum(receive), *x.shape[1:]))
        work = dist.all_to_all_single(
            out, x.contiguous(), list(receive), list(send), group=self._group, async_op=True
        )
        return _Work(work, out)


class _Work:
    __slots__ = ("_out", "_work")

    def __init__(self, work: dist.Work | None, out: Tensor) -> None:
        self._work, self._out = work, out

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._out
