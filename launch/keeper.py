"""A keeper: parent of one rank, of a spare and perhaps of its node's relay; does what the controller says.

It starts no thread and loads no model, so that it lives on when its rank does not: launchers must not see a rank's end.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from launch.exit_codes import EXIT_CONFIG, EXIT_ENGINE, EXIT_OK, EXIT_PEER_LOST, exit_code_of_signal
from launch.keeper_children import Child, RankChild
from runtime.cluster.grants import Grant
from runtime.cluster.keeper_messages import (
    KEEPER_FRAME,
    Abort,
    End,
    GaveUp,
    Join,
    JoinFailed,
    Ping,
    RankAbort,
    RankEnded,
    RankJoin,
    RankStanding,
    RestartRelay,
    Standing,
    ToKeeper,
    decode_to_keeper,
    encode,
)
from runtime.cluster.line import FrameLine
from runtime.cluster.line_errors import LineError

PING_S = 0.5
GRANT_S = 3.0  # how long the memory of an epoch is waited for
STOPPED_S = 2.0  # beyond `stall_s`, within which the controller notices who is in an epoch
MAX_STILLBORN = 3  # processes that ended before they were up, one after the other
RELAY_PAUSE_S = 0.2  # between the end of a relay and the start of the next
FAREWELL_S = 1.0  # how long the last words may take


class Starter(Protocol):
    """Where processes come from (launch/keeper_children.py)."""

    def start_rank(self, serial: int) -> RankChild: ...

    def start_relay(self) -> Child | None: ...


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a keeper ends: its exit code, and a line for whoever started it unless it is ""."""

    code: int
    text: str


class Keeper:
    """Runs until there is a verdict; `run` leaves no process behind.

    `host`: the address at which other ranks reach this one. `fetch(epoch, timeout_s)` gets the memory of an epoch.
    `stall_s`: as in [cluster] of the configuration.
    """

    def __init__(
        self, line: FrameLine, starter: Starter, *, host: str, fetch: Callable[[int, float], Grant], spare: bool,
        stall_s: float,
    ) -> None:
        self._line, self._starter, self._host, self._fetch = line, starter, host, fetch
        self._with_spare, self._stall_s = spare, stall_s
        self._parent = os.getppid()
        self._serial = 0
        self._stillborn = 0
        self._spare: RankChild | None = None
        self._relay: Child | None = None
        self._relay_due: float | None = None
        self._called_off = 0  # the last epoch that is known to be over
        self._leave_by = float("inf")
        self._pinged = 0.0
        self._verdict: Verdict | None = None
        self._signals, self._wake = socket.socketpair()
        for sock in (self._signals, self._wake):
            sock.setblocking(False)
        self._current: RankChild | None = self._new_rank()
        self._start_relay()

    def run(self) -> Verdict:
        """Look after the children until the controller ends the job, or is gone, or this process is told to stop."""
        with _signals_to(self._wake):
            try:
                while self._verdict is None:
                    self._wait()
                    self._turn(time.monotonic())
                self._say_farewell(self._verdict)
                return self._verdict
            finally:
                self._end_all()

    def _wait(self) -> None:
        children = [child for child in (self._current, self._spare, self._relay) if child is not None]
        fds = [child.pidfd for child in children]
        fds += [child.socket.fileno() for child in children if isinstance(child, RankChild) and child.hears]
        until = min(self._leave_by, self._relay_due or float("inf"), self._pinged + PING_S)
        fds += [self._line.fileno(), self._signals.fileno()]
        select.select(fds, [self._line] if self._line.wants_write else [], [], max(until - time.monotonic(), 0.0))

    def _turn(self, now: float) -> None:
        """One look at everything."""
        self._heed_signals()
        for child in (self._current, self._spare):
            if child is not None:
                self._hear(child)
        self._look_for_ends(now)
        self._heed_controller()
        if now >= self._leave_by and self._current is not None:
            self._leave_by = float("inf")
            self._current.kill()
        if self._relay_due is not None and now >= self._relay_due:
            self._start_relay()
        if now - self._pinged >= PING_S:
            self._pinged = now
            self._tell(Ping())
            self._look_for_stopped(now)
        if os.getppid() != self._parent:
            self._end(EXIT_PEER_LOST, "whoever started this process is gone")

    def _heed_signals(self) -> None:
        with suppress(BlockingIOError):
            number = self._signals.recv(64)[0]
            self._end(exit_code_of_signal(number), f"ended by {signal.Signals(number).name}")

    # What ranks say and how they end

    def _hear(self, child: RankChild) -> None:
        while child.hears and (message := child.hear()) is not None:
            if isinstance(message, RankStanding):
                child.port, child.left, child.epoch = message.port, message.left, 0
                self._stillborn = 0
                if child is self._current:
                    self._leave_by = float("inf")
                    self._report(child)
            elif child is self._current and self._with_spare and self._spare is None:
                self._spare = self._new_rank()

    def _report(self, child: RankChild) -> None:
        left = max(child.left, self._called_off)
        self._tell(Standing(serial=child.serial, left=left, host=self._host, port=child.port))

    def _look_for_ends(self, now: float) -> None:
        if self._spare is not None and _has_ended(self._spare):
            self._count(self._spare)
            self._spare.reap()
            self._spare = None  # another one is started after the next loading
        if self._current is not None and _has_ended(self._current):
            self._replace(self._current)
        if self._relay is not None and _has_ended(self._relay):
            self._relay.reap()
            self._relay, self._relay_due = None, now + RELAY_PAUSE_S

    def _look_for_stopped(self, now: float) -> None:
        """Kill what has been stopped for long: the controller only sees who is in an epoch."""
        for child in (self._current, self._spare, self._relay):
            if child is not None and (child.stopped_for(now) or 0.0) >= self._stall_s + STOPPED_S:
                child.kill()

    def _replace(self, ended: RankChild) -> None:
        """Tell of the end; a spare takes over, or a process that is started now. One that was told to stop is not."""
        code = ended.reap()
        self._leave_by = float("inf")
        self._count(ended)
        self._tell(RankEnded(serial=ended.serial, code=code, text=""))
        if code == EXIT_OK:
            self._current = None
            return
        self._take_over()
        if self._stillborn >= MAX_STILLBORN:
            self._end(EXIT_ENGINE, f"{self._stillborn} processes in a row ended while they started, the last with "
                      f"exit code {code}")

    def _take_over(self) -> None:
        if self._spare is not None and self._spare.stopped_for(time.monotonic()) is not None:
            self._spare.kill()
            self._spare.reap()
            self._spare = None
        self._current, self._spare = self._spare or self._new_rank(), None
        if self._current.port:
            self._report(self._current)

    def _count(self, ended: RankChild) -> None:
        self._stillborn = 0 if ended.port else self._stillborn + 1

    def _new_rank(self) -> RankChild:
        self._serial += 1
        return self._starter.start_rank(self._serial)

    def _start_relay(self) -> None:
        self._relay, self._relay_due = self._starter.start_relay(), None

    # What the controller says

    def _heed_controller(self) -> None:
        try:
            self._line.flush()
            for frame in self._line.receive():
                if frame.kind == KEEPER_FRAME and self._verdict is None:
                    self._obey(decode_to_keeper(frame.body))
        except LineError as error:
            self._end(EXIT_PEER_LOST, f"the controller is gone: {error}")
        except ValueError as error:
            self._end(EXIT_CONFIG, f"the controller sent what cannot be read: {error}")

    def _obey(self, message: ToKeeper) -> None:
        if isinstance(message, Join):
            self._join(message)
        elif isinstance(message, Abort):
            self._call_off(message)
        elif isinstance(message, RestartRelay):
            if self._relay is not None and message.pid in (0, self._relay.pid):
                self._relay.kill()
        elif isinstance(message, End):
            self._end(message.code, message.text)

    def _join(self, join: Join) -> None:
        child = self._current
        if child is None or child.serial != join.serial or join.epoch <= self._called_off:
            return  # the controller will hear, or has heard, of what made this invitation old
        try:
            grant = self._fetch(join.epoch, GRANT_S)
        except (LineError, OSError) as error:
            self._tell(JoinFailed(epoch=join.epoch, text=str(error)))
            return
        child.epoch = join.epoch
        message = RankJoin(
            epoch=join.epoch, hosts=join.hosts, ports=join.ports, nodes=join.nodes, plans_index=grant.reader_index,
            vitals_index=grant.vitals_index, segments=list(grant.segments), slot_bytes=grant.slot_bytes,
        )
        child.tell(message, grant.fds)
        grant.close()

    def _call_off(self, abort: Abort) -> None:
        self._called_off = max(self._called_off, abort.epoch)
        if self._current is None:  # it ended well, for a reason of its own
            self._take_over()
            return
        child = self._current
        if 0 < child.epoch <= abort.epoch:
            child.tell(RankAbort(epoch=abort.epoch))
            self._leave_by = time.monotonic() + abort.leave_s
        elif child.port and not child.epoch:
            self._report(child)

    # The end

    def _tell(self, message: object) -> None:
        try:
            self._line.send(KEEPER_FRAME, 0, encode(message))
        except LineError as error:
            self._end(EXIT_PEER_LOST, f"the controller is gone: {error}")

    def _end(self, code: int, text: str) -> None:
        self._verdict = self._verdict or Verdict(code=code, text=text)

    def _say_farewell(self, verdict: Verdict) -> None:
        self._tell(GaveUp(code=verdict.code, text=verdict.text))
        until = time.monotonic() + FAREWELL_S
        with suppress(LineError):
            while not self._line.flush() and time.monotonic() < until:
                select.select([], [self._line], [], 0.1)

    def _end_all(self) -> None:
        """Kill and reap all children; nothing of them stays."""
        children = [child for child in (self._current, self._spare, self._relay) if child is not None]
        for child in children:
            child.kill()
        for child in children:
            child.reap()
        self._current = self._spare = self._relay = None
        self._line.close()
        self._signals.close()
        self._wake.close()


@contextmanager
def _signals_to(sock: socket.socket) -> Iterator[None]:
    """SIGTERM and SIGINT wake the loop through `sock` instead of ending the process."""
    before = {number: signal.signal(number, lambda _number, _frame: None) for number in (signal.SIGTERM, signal.SIGINT)}
    fd = signal.set_wakeup_fd(sock.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_ended(child: Child) -> bool:
    return bool(select.select([child.pidfd], [], [], 0)[0])
