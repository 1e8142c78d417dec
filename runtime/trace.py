"""Spans on their way from a rank to the controller, and what the clocks of two hosts differ by."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parallel.trace import TRACKS, Recorder, Span
from runtime.rank_messages import TracePage

PAGE_SPANS = 512  # 12 KB: small beside the room in a ring of results
_SPAN = struct.Struct("<HHiqq")  # name, track, step, begin, end


def clock_name() -> str:
    """Names the monotonic clock of this process: two processes whose clocks have one name can compare their times."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return f"process {os.getpid()}"
    offsets = Path("/proc/self/timens_offsets")  # a time namespace may move the clock
    moved = " ".join(offsets.read_text().split()) if offsets.exists() else ""
    return f"{boot.read_text().strip()} {moved}"


def next_page(recorder: Recorder, clock: str, *, is_last: bool = False) -> TracePage:
    """The oldest spans of a recorder, `PAGE_SPANS` at most, as the message that takes them to the controller."""
    spans = recorder.take(PAGE_SPANS)
    names = {name: i for i, name in enumerate(dict.fromkeys(span.name for span in spans))}
    packed = b"".join(_SPAN.pack(names[s.name], s.track, s.step, s.begin, s.end) for s in spans)
    return TracePage(
        clock=clock, sent_ns=recorder.clock(), names=list(names), spans=packed, num_dropped=recorder.num_dropped,
        is_last=is_last,
    )


def spans_of(page: TracePage) -> list[Span]:
    """Raises ValueError for a page that no `next_page` made."""
    if len(page.spans) % _SPAN.size:
        raise ValueError(f"trace page of {len(page.spans)} bytes: expected a multiple of {_SPAN.size}")
    spans = []
    for name, track, step, begin, end in _SPAN.iter_unpack(page.spans):
        if name >= len(page.names) or track >= len(TRACKS):
            raise ValueError(f"trace page: name {name} of {len(page.names)}, track {track} of {len(TRACKS)}")
        spans.append(Span(track, page.names[name], begin, end, step))
    return spans


@dataclass(kw_only=True)
class ProcessTrace:
    """The pages of one process, as they come; they are taken apart when somebody asks for `spans`."""

    pages: list[tuple[int, TracePage]] = field(default_factory=list)  # with the time of receipt, by the controller

    def add(self, page: TracePage, received_ns: int) -> None:
        self.pages.append((received_ns, page))

    @property
    def is_complete(self) -> bool:
        return bool(self.pages) and self.pages[-1][1].is_last

    @property
    def clock(self) -> str:
        """Whose clock the times are on; "" while nothing has come."""
        return self.pages[-1][1].clock if self.pages else ""

    @property
    def num_dropped(self) -> int:
        return self.pages[-1][1].num_dropped if self.pages else 0

    @property
    def spans(self) -> list[Span]:
        return [span for _, page in self.pages for span in spans_of(page)]

    @property
    def travels(self) -> list[tuple[int, int]]:
        """Of each page: when it left by the process's clock, and when it came by the controller's."""
        return [(page.sent_ns, received_ns) for received_ns, page in self.pages]


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """What to take from a rank's times to have them on the controller's clock, and how much that may be wrong."""

    offset_ns: int
    error_ns: int


def clock_offset(
    plans_sent: Iterable[tuple[int, int]], plans_read: Iterable[tuple[int, int]], pages: Sequence[tuple[int, int]]
) -> ClockOffset | None:
    """From messages in both directions: nothing arrives before it was sent, whatever the clocks say.

    plans_sent: (step, time) by the controller's clock; plans_read: (step, time) by the rank's; pages: (sent, received)
    by the rank's and the controller's. The least delayed message of each direction bounds the offset; the middle is
    taken. None when one direction has no message.
    """
    sent = dict(plans_sent)
    above = [read - sent[step] for step, read in plans_read if step in sent]
    below = [left - came for left, came in pages]
    if not above or not below:
        return None
    most, least = min(above), max(below)
    return ClockOffset(offset_ns=(most + least) // 2, error_ns=abs(most - least) // 2)
