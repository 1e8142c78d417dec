"""The relay of a node: plans from the controller into the node's ring, results and signs of life back.

One thread waits for the controller's line and for keepers; one thread a rank waits for its results, which it sends
itself. Each epoch has memory of its own; whatever belongs to an older one is dropped by its number.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from runtime.cluster.grants import GrantServer
from runtime.cluster.line import Frame, FrameDamaged, FrameLine, LineCongested, LineError
from runtime.cluster.node_memory import NodeMemory
from runtime.cluster.relay_messages import (
    OpenEpoch,
    RelayFrame,
    RelayHello,
    Trouble,
    decode,
    encode,
    frame_result,
)
from runtime.cluster.result_pump import ResultPump
from runtime.ring import RingError

VITALS_S = 0.1  # between two pages of signs of life, or beats outside of an epoch
CREDIT_S = 20.0  # so long after the controller's last beat none is sent: it does not read, and they would pile up
BEHIND_S = 0.002  # between two looks for room in a full plan ring
CONGESTED_S = 0.005
LEAST_FRAME_BYTES = 64 << 10


class Relay:
    """Serves one line to the controller. `check` runs ten times a second."""

    def __init__(
        self, line: FrameLine, grants: GrantServer, node_rank: int,
        *, host: str, check: Callable[[], None] | None = None,
    ) -> None:
        self._line, self._grants, self._node_rank, self._host = line, grants, node_rank, host
        self._check = check
        self._epoch = 0  # the last one opened
        self._memory: NodeMemory | None = None
        self._pumps: list[ResultPump] = []
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._heard = time.monotonic()  # when the controller last beat
        self._next_vitals = 0.0
        self._poll = select.poll()
        for fd in (line.fileno(), grants.fileno(), self._wake_fd):
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> NoReturn:
        """Work until the line ends; raises the LineError that ended it."""
        hello = RelayHello(node_rank=self._node_rank, host=self._host, pid=os.getpid())
        self._line.send(RelayFrame.HELLO, 0, encode(hello))
        while True:
            self._turn()

    def close(self) -> None:
        """Let go of line and memory; the grants stay the caller's. May be called twice."""
        pumps = self._pumps
        self._end_epoch()
        for pump in pumps:
            pump.join()
        self._line.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _turn(self) -> None:
        """Wait for whatever comes first, and serve all that is there."""
        wait_s = max(self._next_vitals - time.monotonic(), 0.0)
        if self._memory is not None and self._memory.is_behind:
            wait_s = min(wait_s, BEHIND_S)
        self._poll.modify(self._line.fileno(), select.POLLIN | (select.POLLOUT if self._line.wants_write else 0))
        ready = dict(self._poll.poll(wait_s * 1000))
        if self._line.fileno() in ready:
            for frame in self._line.receive():
                self._take(frame)
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        self._line.flush()
        if self._grants.fileno() in ready:
            self._grants.handle(self._memory, self._epoch)
        if self._memory is not None and self._memory.is_behind:
            self._to_ring(self._memory, self._memory.flush_plans)
        if time.monotonic() >= self._next_vitals:
            self._beat()

    def _take(self, frame: Frame) -> None:
        if frame.kind == RelayFrame.BEAT:
            self._heard = time.monotonic()
        elif frame.kind == RelayFrame.OPEN:
            self._open(frame)
        elif frame.kind == RelayFrame.CLOSE:
            if frame.epoch == self._epoch:
                self._end_epoch()
        elif frame.kind == RelayFrame.PLANS:
            memory = self._memory
            if memory is not None and frame.epoch == memory.epoch:
                self._to_ring(memory, partial(memory.send_plans, frame.body))
        else:
            raise FrameDamaged(f"{self._line.peer} sends a frame of kind {frame.kind}")

    def _open(self, frame: Frame) -> None:
        if frame.epoch <= self._epoch:
            raise FrameDamaged(f"{self._line.peer} opens epoch {frame.epoch}, the last was {self._epoch}")
        self._end_epoch()
        self._epoch = self._line.oldest_epoch = frame.epoch
        self._heard = time.monotonic()
        try:
            opening = decode(OpenEpoch, frame.body)
            self._memory = memory = NodeMemory(frame.epoch, opening)
        except (OSError, ValueError) as error:
            self._tell(frame.epoch, Trouble(rank=-1, error="OSError", text=f"no memory for the epoch: {error}"))
            return
        self._line.max_frame_bytes = max(LEAST_FRAME_BYTES, opening.plan_bytes)
        self._line.send(RelayFrame.OPENED, frame.epoch, b"", limited=False)
        forward, fail = partial(self._forward, memory), partial(self._fail, memory.epoch)
        self._pumps = [
            ResultPump(rank, fd, forward, fail) for rank, fd in zip(memory.ranks, memory.results_fds, strict=True)
        ]
        self._grants.handle(memory, self._epoch)  # keepers that were early

    def _end_epoch(self) -> None:
        """Threads end by themselves soon; what they still send has the old number."""
        for pump in self._pumps:
            pump.stop()
        self._pumps = []
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
            self._grants.handle(None, self._epoch)

    def _to_ring(self, memory: NodeMemory, send: Callable[[], None]) -> None:
        """After a fault of the plan ring nothing more goes into it; ranks may still say what happened to them."""
        try:
            send()
        except RingError as error:
            memory.abandon_plans()
            self._fail(memory.epoch, -1, error)

    def _forward(self, memory: NodeMemory, rank: int, data: bytes) -> bool:
        """From a result thread: waits as long as the controller takes nothing, which holds up the rank's ring."""
        body = frame_result(rank, data)
        while self._memory is memory:
            try:
                self._line.send(RelayFrame.RESULT, memory.epoch, body)
            except LineCongested:
                time.sleep(CONGESTED_S)
                continue
            except LineError:
                return False  # the other thread finds out, too
            if self._line.wants_write:
                os.eventfd_write(self._wake_fd, 1)
            return True
        return False

    def _fail(self, epoch: int, rank: int, error: RingError) -> None:
        self._tell(epoch, Trouble(rank=rank, error=type(error).__name__, text=f"node {self._node_rank}: {error}"))

    def _tell(self, epoch: int, trouble: Trouble) -> None:
        with contextlib.suppress(LineError):  # a line that is gone is noticed where it is read
            self._line.send(RelayFrame.TROUBLE, epoch, encode(trouble), limited=False)

    def _beat(self) -> None:
        now = time.monotonic()
        self._next_vitals = now + VITALS_S
        if self._check is not None:
            self._check()
        if self._line.wants_write or now - self._heard > CREDIT_S:
            return
        if self._memory is not None:
            self._line.send(RelayFrame.VITALS, self._memory.epoch, self._memory.vitals())
        else:
            self._line.send(RelayFrame.BEAT, 0, b"")
