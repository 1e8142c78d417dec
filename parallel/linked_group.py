"""Collectives over ranks of several hosts: a stream to each rank elsewhere, shared memory with those of this host.

What a rank gives leaves for the other hosts when the operation starts: the network carries it while everybody computes,
and a wait takes one way's latency at most. Sums are added in rank order, so that the bits are those of `ShmGroup`.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from parallel.abort import AbortSignal
from parallel.group import Pending, PendingRows, ReadyRows
from parallel.shm_group import OPERATIONS, ShmGroup
from parallel.socket_link import Link
from parallel.socket_mover import Mover

LINGER_S = 1.0
_GATHER, _SCATTER, _EXCHANGE, _UNEVEN, _SIZED = range(len(OPERATIONS))


class LinkedGroup:
    """`rank` of `size` ranks. `links`: to each rank on another host; `local`: with those of this host, in order.

    `local_ranks`: the group's ranks on this host, this one among them; `local` is None where it is alone.
    Operations raise PeerLost or OutOfStep (RuntimeError from `local`) naming the rank, Aborted when called off.
    """

    def __init__(
        self, name: str, rank: int, size: int, *, links: Mapping[int, Link], local: ShmGroup | None,
        local_ranks: Sequence[int], mover: Mover, abort: AbortSignal,
    ) -> None:
        assert sorted([*links, *local_ranks]) == list(range(size)), (list(links), local_ranks, size)
        self.name, self.rank, self.size = name, rank, size
        # Each starts with the rank after it, so that not all send to the same one first.
        self._links = {peer: links[peer] for peer in sorted(links, key=lambda peer: (peer - rank) % size)}
        self._local, self._local_ranks = local, list(local_ranks)
        self._mover, self._abort = mover, abort
        self._count = 0

    def all_gather(self, x: Tensor) -> Pending:
        n, x = x.shape[0], x.contiguous()
        out = x.new_empty((self.size * n, *x.shape[1:]))
        blocks = [n] * self.size
        call = self._exchange(_GATHER, x, [0] * self.size, blocks, out, blocks)
        local = self._local.all_gather(x) if self._local is not None else None
        return _Linked(self, call, out, self._placing(local, x, out, blocks))

    def reduce_scatter(self, x: Tensor) -> Pending:
        n, x = self._block(x), x.contiguous()
        parts = torch.empty_like(x)  # [size * n, ...]: what each rank adds
        blocks = [n] * self.size
        call = self._exchange(_SCATTER, x, _begins(blocks), blocks, parts, blocks)
        own = self._own(x, blocks)
        place = self._placing(self._local.summands(own) if self._local is not None else None, own, parts, blocks)

        def add() -> Tensor:
            place()
            total = x.new_zeros((n, *x.shape[1:]))
            for part in parts.view(self.size, n, *x.shape[1:]):
                total.add_(part)
            return total

        return _Linked(self, call, parts, add)

    def all_to_all(self, x: Tensor) -> Pending:
        n, x = self._block(x), x.contiguous()
        out = torch.empty_like(x)
        blocks = [n] * self.size
        call = self._exchange(_EXCHANGE, x, _begins(blocks), blocks, out, blocks)
        own = self._own(x, blocks)
        local = self._local.all_to_all(own) if self._local is not None else None
        return _Linked(self, call, out, self._placing(local, own, out, blocks))

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        assert x.shape[0] == sum(send), (x.shape, send)
        x = x.contiguous()
        out = x.new_empty((sum(receive), *x.shape[1:]))
        call = self._exchange(_UNEVEN, x, _begins(send), send, out, receive)
        own, local = self._own(x, send), None
        if self._local is not None:
            there = [send[rank] for rank in self._local_ranks], [receive[rank] for rank in self._local_ranks]
            local = self._local.all_to_all_uneven(own, *there)
        return _Linked(self, call, out, self._placing(local, own, out, receive))

    def all_to_all_sized(self, x: Tensor, send: Sequence[int], most: int) -> PendingRows:
        assert x.shape[0] == sum(send), (x.shape, send)
        assert max(send) <= most, (send, most)
        x, call = x.contiguous(), self._count
        self._count += 1
        out = x.new_empty((self.size, most, *x.shape[1:]))
        self._send(call, _SIZED, x, _begins(send), send)
        row, sizes = _row_bytes(x), {}
        for peer, link in self._links.items():
            sizes[peer] = link.expect_most(call, _SIZED, _bytes(out[peer]))
        own = self._own(x, send)
        local: PendingRows = ReadyRows(own, [len(own)])
        if self._local is not None:
            local = self._local.all_to_all_sized(own, [send[rank] for rank in self._local_ranks], most)

        def gather() -> tuple[Tensor, list[int]]:
            rows, counts = local.wait()
            parts = dict(zip(self._local_ranks, torch.split(rows, counts), strict=True))
            parts |= {peer: out[peer, : size() // row] for peer, size in sizes.items()}
            in_order = [parts[rank] for rank in range(self.size)]
            return torch.cat(in_order), [len(part) for part in in_order]

        return _LinkedRows(self, call, gather)

    def finish(self, call: int) -> None:
        """Wait until the messages of `call` are in place."""
        waiting = {link.fileno(): link for link in self._links.values() if not link.receive(call)}
        if not waiting:
            return
        attended = list(waiting.values())
        poller = select.poll()
        poller.register(self._abort, select.POLLIN)
        for link in attended:
            link.attend(True)
            poller.register(link, select.POLLIN)
        try:
            # The mover may have taken the last of it, just before it was told to keep its hands off.
            ready = list(waiting)
            while True:
                for fd in ready:
                    if fd in waiting and waiting[fd].receive(call):
                        del waiting[fd]
                        poller.unregister(fd)
                if not waiting:
                    return
                self._abort.raise_if_set()
                ready = [fd for fd, _ in poller.poll()]
        finally:
            for link in attended:
                link.attend(False)

    def close(self) -> None:
        """Close the streams. Other ranks that wait for this one are told that it is lost.

        What this rank has given in calls that it has done its part of still leaves, unless they are called off.
        """
        self._mover.close(0.0 if self._abort.is_set else LINGER_S)
        for link in self._links.values():
            link.close()

    def _block(self, x: Tensor) -> int:
        assert x.shape[0] % self.size == 0, (x.shape, self.size)
        return x.shape[0] // self.size

    def _exchange(
        self, operation: int, x: Tensor, begins: Sequence[int], send: Sequence[int], out: Tensor, receive: Sequence[int]
    ) -> int:
        """Send `send[r]` rows from `begins[r]` on to each r elsewhere, and expect `receive[r]` from it into `out`."""
        call, self._count = self._count, self._count + 1
        self._send(call, operation, x, begins, send)
        places, taken, row = _begins(receive), _bytes(out), _row_bytes(x)
        for peer, link in self._links.items():
            link.expect(call, operation, taken[places[peer] * row : (places[peer] + receive[peer]) * row])
        return call

    def _send(self, call: int, operation: int, x: Tensor, begins: Sequence[int], send: Sequence[int]) -> None:
        given, row = _bytes(x), _row_bytes(x)
        for peer, link in self._links.items():
            link.send(call, operation, given[begins[peer] * row : (begins[peer] + send[peer]) * row])

    def _own(self, x: Tensor, send: Sequence[int]) -> Tensor:
        """The rows for the ranks of this host, in their order."""
        if self._local is None:
            return _rows(x, send, self.rank)
        return torch.cat([_rows(x, send, rank) for rank in self._local_ranks])

    def _placing(self, local: Pending | None, own: Tensor, out: Tensor, receive: Sequence[int]) -> Callable[[], Tensor]:
        """How to put what the ranks of this host gave (`own`: this one, alone) in place in `out`, and get that."""
        if local is None:
            _rows(out, receive, self.rank).copy_(own)
            return lambda: out

        def place() -> Tensor:
            given = torch.split(local.wait(), [receive[rank] for rank in self._local_ranks])
            for rank, rows in zip(self._local_ranks, given, strict=True):
                _rows(out, receive, rank).copy_(rows)
            return out

        return place


class _Linked:
    __slots__ = ("_call", "_finish", "_group", "_out")

    def __init__(self, group: LinkedGroup, call: int, out: Tensor, finish: Callable[[], Tensor]) -> None:
        self._group: LinkedGroup | None = group
        self._call, self._out, self._finish = call, out, finish

    def wait(self) -> Tensor:
        if self._group is not None:
            self._group.finish(self._call)
            self._out, self._group = self._finish(), None
        return self._out


class _LinkedRows:
    __slots__ = ("_call", "_gather", "_group", "_result")

    def __init__(self, group: LinkedGroup, call: int, gather: Callable[[], tuple[Tensor, list[int]]]) -> None:
        self._group, self._call, self._gather = group, call, gather
        self._result: tuple[Tensor, list[int]] | None = None

    def wait(self) -> tuple[Tensor, list[int]]:
        if self._result is None:
            self._group.finish(self._call)
            self._result = self._gather()
        return self._result


def _rows(x: Tensor, counts: Sequence[int], rank: int) -> Tensor:
    """The block of `rank`, where each rank has as many rows as `counts` says, in order."""
    begin = sum(counts[:rank])
    return x[begin : begin + counts[rank]]


def _begins(counts: Sequence[int]) -> list[int]:
    """The sum of the counts before each."""
    begins, total = [], 0
    for count in counts:
        begins.append(total)
        total += count
    return begins


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return x.detach().view(-1).view(torch.uint8).numpy().data


def _row_bytes(x: Tensor) -> int:
    """x: [n, ...]."""
    size = x.element_size()
    for length in x.shape[1:]:
        size *= length
    return size
