"""The controller's lines to keepers: sends, receives, and notes which are lost or quiet."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from runtime.cluster.keeper_messages import (
    KEEPER_FRAME,
    End,
    FromKeeper,
    Ping,
    ToKeeper,
    decode_from_keeper,
    encode,
)
from runtime.cluster.line import Frame, FrameLine, LineError

PING_S = 1.0
DUE_S = 0.01
DISMISS_S = 3.0


class KeeperLines:
    """The lines of those keepers that are here, by rank."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._lines: dict[int, FrameLine] = {}
        self._heard: dict[int, float] = {}
        self._lost: list[tuple[int, str]] = []
        self._leaving: list[tuple[FrameLine, float]] = []  # dismissed: they close first, until then
        self._polled = 0.0
        self._pinged = 0.0

    def add(self, rank: int, line: FrameLine) -> None:
        """A keeper has come. How the line before it ended, if nobody has been told yet, is of no interest any more."""
        self._lines[rank], self._heard[rank] = line, time.monotonic()
        self._lost = [lost for lost in self._lost if lost[0] != rank]

    def drop(self, rank: int) -> None:
        """Close a line; the keeper at its other end, if there is one, ends."""
        line = self._lines.pop(rank, None)
        if line is not None:
            line.close()

    def is_due(self) -> bool:
        """Whether the last `wait` is so long ago that another may find something."""
        return time.monotonic() - self._polled >= DUE_S

    def is_quiet(self, rank: int) -> bool:
        """Whether nothing has come from this keeper for as long as a stall; true where there is none."""
        return rank not in self._lines or time.monotonic() - self._heard[rank] >= self._stall_s

    def tell(self, rank: int, message: ToKeeper) -> None:
        """A line that is gone is told of by `take_lost`."""
        line = self._lines.get(rank)
        if line is None:
            return
        try:
            line.send(KEEPER_FRAME, 0, encode(message))
        except LineError as error:
            self._lose(rank, error)

    def wait(self, others: Iterable[int], timeout_s: float) -> None:
        """Until a keeper says something, or one of the other descriptors is readable; `timeout_s` at most."""
        poller = select.poll()
        for fd in others:
            poller.register(fd, select.POLLIN)
        for line in self._lines.values():
            poller.register(line.fileno(), select.POLLIN | (select.POLLOUT if line.wants_write else 0))
        poller.poll(timeout_s * 1000)
        self._polled = time.monotonic()
        if self._polled - self._pinged >= PING_S:
            self._pinged = self._polled
            for rank in list(self._lines):
                self.tell(rank, Ping())

    def receive(self) -> Iterator[tuple[int, FromKeeper]]:
        """What has come, by rank; never waits."""
        self._see_off()
        for rank, line in list(self._lines.items()):
            try:
                line.flush()
                frames = line.receive()
            except LineError as error:
                self._lose(rank, error)
                continue
            if frames:
                self._heard[rank] = time.monotonic()
            for message in self.decoded(rank, frames):
                yield rank, message

    def decoded(self, rank: int, frames: Sequence[Frame]) -> list[FromKeeper]:
        """Messages in frames. A keeper that sends what cannot be read is lost."""
        messages: list[FromKeeper] = []
        try:
            for frame in frames:
                messages.append(decode_from_keeper(frame.body))
        except ValueError as error:
            self._lose(rank, error)
        return messages

    def take_lost(self) -> list[tuple[int, str]]:
        """Keepers whose lines broke since the last call, and how."""
        lost, self._lost = self._lost, []
        return lost

    def dismiss(self, line: FrameLine, end: End) -> None:
        """Tell a keeper that does not belong here; it closes the line, or we do some time later."""
        with suppress(LineError):
            line.send(KEEPER_FRAME, 0, encode(end))
        self._leaving.append((line, time.monotonic() + DISMISS_S))

    def end_all(self, end: End, timeout_s: float) -> None:
        """Tell all, wait until they have closed their lines, `timeout_s` at most, and close."""
        for rank in list(self._lines):
            self.tell(rank, end)
        until = time.monotonic() + timeout_s
        while (self._lines or self._leaving) and time.monotonic() < until:
            self.wait((), 0.05)
            for _ in self.receive():
                pass  # they say farewell, then close
        for rank in list(self._lines):
            self.drop(rank)
        for line, _ in self._leaving:
            line.close()
        self._lost, self._leaving = [], []

    def _see_off(self) -> None:
        """Let go of lines to the dismissed once they have closed them: closing first could lose words."""
        for line, until in list(self._leaving):
            try:
                line.flush()
                line.receive()
                if time.monotonic() < until:
                    continue
            except LineError:
                pass
            self._leaving.remove((line, until))
            line.close()

    def _lose(self, rank: int, why: Exception) -> None:
        self.drop(rank)
        self._lost.append((rank, str(why)))
