"""Spans of what one process does, for a picture of its steps. While nobody wants one, next to nothing is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

T = TypeVar("T")

HOST, WHOLE, HALF_A, HALF_B = range(4)
EXCHANGES = 3  # from the track of a half, or of a whole pass, to that of its exchanges
TRACKS = (
    "host", "whole pass", "half A", "half B", "exchanges (whole pass)", "exchanges of half A", "exchanges of half B"
)
DEFAULT_LIMIT = 1 << 16


class Span(NamedTuple):
    """`begin` and `end` in ns on the process's clock; `step` is -1 outside steps."""

    track: int
    name: str
    begin: int
    end: int
    step: int


class Recorder:
    """Notes spans while `on`. Whoever runs a half sets `track`, whoever runs a step `step`.

    Not more than `limit` spans are kept until they are taken; `num_dropped` counts those that came then. The clock is
    the machine's monotonic one, which all processes of a host share.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, limit: int = DEFAULT_LIMIT) -> None:
        self.on = False
        self.track, self.step = HOST, -1
        self.num_dropped = 0
        self.clock = clock
        self._limit = limit
        self._spans: list[Span] = []
        self._part = ""  # what the current track is at, for the names of exchanges
        self._phase, self._phase_began = "", 0

    @property
    def num_spans(self) -> int:
        return len(self._spans)

    def start(self) -> None:
        """Note spans from now on; those of an earlier time are forgotten."""
        self._spans, self.num_dropped, self._phase = [], 0, ""
        self.track, self._part = HOST, ""  # a step that was cut short has left its own there
        self.on = True

    def stop(self) -> None:
        """Note nothing more; what was noted can still be taken."""
        self.phase("")
        self.on = False

    def phase(self, name: str) -> None:
        """The process now does this, on the host's track, until the next call; "" is nothing worth a span."""
        if not self.on:
            return
        now = self.clock()
        if self._phase:
            self.add(HOST, self._phase, self._phase_began, now)
        self._phase, self._phase_began = name, now

    def run(self, name: str, call: Callable[[T], None], argument: T) -> None:
        """Call, and note that as a span of the current track."""
        self._part, begin = name, self.clock()
        call(argument)
        self.add(self.track, name, begin, self.clock())
        self._part = ""

    def exchange(self, operation: str) -> Exchange:
        """An exchange has just been started."""
        return Exchange(self, operation if not self._part else f"{self._part}: {operation}")

    def add(self, track: int, name: str, begin: int, end: int) -> None:
        if len(self._spans) < self._limit:
            self._spans.append(Span(track, name, begin, end, self.step))
        else:
            self.num_dropped += 1

    def take(self, most: int | None = None) -> list[Span]:
        """The oldest spans, which are forgotten."""
        taken, self._spans = self._spans[:most], self._spans[len(self._spans[:most]) :]
        return taken


class Exchange:
    """One exchange on its way: a span of the exchanges' track from its start until it was waited for, and one of the
    half's own track for the wait."""

    __slots__ = ("_begin", "_name", "_recorder", "_track", "_waited")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name, self._track = recorder, name, recorder.track
        self._begin = self._waited = recorder.clock()

    def waiting(self) -> None:
        self._waited = self._recorder.clock()

    def arrived(self) -> None:
        recorder, now = self._recorder, self._recorder.clock()
        recorder.add(self._track, f"wait for {self._name}", self._waited, now)
        if self._track != HOST:
            recorder.add(self._track + EXCHANGES, self._name, self._begin, now)
