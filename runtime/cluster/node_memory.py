"""The shared memory of one node for one epoch: plan ring, result rings, vitals page, segments for exchanges."""

from __future__ import annotations

import mmap
import os
from collections import deque
from contextlib import ExitStack

from runtime.cluster.relay_messages import GrantReply, OpenEpoch
from runtime.ring import ReaderLagging, ReaderNotAttached, RingError, RingWriter, create_segment
from runtime.vitals import page_size

MAX_WAITING = 4  # plans as large as can be that wait for room in the ring


class NodeMemory:
    """Owned by the relay, which writes the plan ring and reads the rest. Ranks get descriptors of their own.

    Nothing has a name, so that whatever is killed leaves nothing behind.
    """

    def __init__(self, epoch: int, opening: OpenEpoch) -> None:
        """Raises ValueError for sizes that no ring has, OSError for memory that is not to be had."""
        self.epoch, self.ranks = epoch, list(opening.ranks)
        self.slot_bytes = opening.slot_bytes
        self._plan_bytes = opening.plan_bytes
        self._waiting: deque[bytes] = deque()
        self._takes_plans = True
        with ExitStack() as stack:
            self._plans_fd = _owned(stack, create_segment("plans", opening.plan_bytes))
            self.results_fds = [
                _owned(stack, create_segment(f"results-{rank}", opening.result_bytes)) for rank in self.ranks
            ]
            self._vitals_fd = _zeroed(stack, "vitals", page_size(len(self.ranks)))
            self._segments = [
                (segment.name, frozenset(segment.ranks), _zeroed(stack, segment.name, segment.num_bytes))
                for segment in opening.segments
            ]
            self._vitals = mmap.mmap(self._vitals_fd, page_size(len(self.ranks)), prot=mmap.PROT_READ)
            stack.callback(self._vitals.close)
            self._plans = RingWriter(self._plans_fd, "plans", [f"rank {rank}" for rank in self.ranks])
            self._stack = stack.pop_all()

    @property
    def is_behind(self) -> bool:
        """Whether plans wait for room in the ring."""
        return bool(self._waiting)

    def grant(self, rank: int) -> tuple[GrantReply, list[int]]:
        """What a rank needs: the reply, and descriptors that stay this object's. Raises ValueError for other ranks."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not on this node, in epoch {self.epoch} it has {self.ranks}")
        index = self.ranks.index(rank)
        mine = [(name, fd) for name, ranks, fd in self._segments if rank in ranks]
        reply = GrantReply(
            epoch=self.epoch, index=index, slot_bytes=self.slot_bytes, segments=[name for name, _ in mine]
        )
        return reply, [self._plans_fd, self.results_fds[index], self._vitals_fd, *(fd for _, fd in mine)]

    def send_plans(self, data: bytes) -> None:
        """Put a message into the plan ring, after those that wait; never waits itself.

        Raises RingError: a reader is gone, or is so far behind that no more messages are kept for it.
        """
        if not self._takes_plans:
            return
        self._waiting.append(data)
        if len(self._waiting) > MAX_WAITING and sum(map(len, self._waiting)) > MAX_WAITING * self._plan_bytes:
            self._plans.check_readers()
            raise ReaderLagging(f"ring 'plans': {len(self._waiting)} messages wait for a reader: {self._lagging()}")
        self.flush_plans()

    def flush_plans(self) -> None:
        """Send what waits, as far as there is room. Raises RingError when a reader is gone."""
        while self._waiting:
            try:
                self._plans.send(self._waiting[0], 0.0)
            except (ReaderLagging, ReaderNotAttached):
                return
            self._waiting.popleft()

    def abandon_plans(self) -> None:
        """Take no more plans: one is missing."""
        self._takes_plans = False
        self._waiting.clear()

    def vitals(self) -> bytes:
        """The records of this node's ranks."""
        return self._vitals[:]

    def close(self) -> None:
        """Tell the readers of the plan ring, and let go. May be called twice."""
        self._plans.close()
        self._stack.close()

    def _lagging(self) -> str:
        try:
            self._plans.send(self._waiting[0], 0.0)
        except RingError as error:
            return str(error)
        return "none any more"


def _owned(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _zeroed(stack: ExitStack, name: str, num_bytes: int) -> int:
    if num_bytes < 1:
        raise ValueError(f"memory {name!r} of {num_bytes} bytes: expected 1 or more")
    fd = _owned(stack, os.memfd_create(f"lockstep-{name}", os.MFD_CLOEXEC))
    os.ftruncate(fd, num_bytes)
    return fd
