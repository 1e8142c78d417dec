"""`--trace FILE.json`: what controller and ranks did in each step, for https://ui.perfetto.dev or chrome://tracing.

A process of the picture is a rank, or the controller; its threads are the host, the whole pass or the two halves, and
the exchanges of each, from the start until somebody had waited for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from parallel.layout import Layout
from parallel.trace import TRACKS, Span
from runtime.channel import Traceable
from runtime.engine import Engine
from runtime.rank_watch import rank_names
from runtime.trace import ClockOffset, ProcessTrace, clock_name, clock_offset

Event = dict[str, Any]
READING, SENDING = "reading the plan", "sending the plan"  # phases that tell when a plan came, and when it left


def start_trace(engine: Engine) -> None:
    """From now on, until `write_trace`. Raises ValueError for an engine whose ranks cannot be traced."""
    channel = engine.channel
    if not isinstance(channel, Traceable):
        raise ValueError(f"ranks behind a {type(channel).__name__} cannot be traced")
    engine.trace.start()
    channel.start_trace()


def write_trace(engine: Engine, path: Path) -> str:
    """End the trace and write it; one line on what it holds. Raises OSError for a file that cannot be written."""
    channel = engine.channel
    assert isinstance(channel, Traceable)
    ranks = channel.stop_trace()
    engine.trace.stop()
    events = merge(engine.config.layout, engine.trace.take(), ranks)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")))
    steps = {event["args"]["step"] for event in events if event["ph"] == "X"}
    dropped = engine.trace.num_dropped + sum(rank.num_dropped for rank in ranks)
    missing = [i for i, rank in enumerate(ranks) if not rank.is_complete]
    notes = [f"{dropped} spans had no room"] * bool(dropped) + [f"ranks {missing} sent no end"] * bool(missing)
    return f"{path}: {sum(e['ph'] == 'X' for e in events)} spans of {len(steps - {-1})} steps" + "".join(
        f"; {note}" for note in notes
    )


def merge(layout: Layout, controller: Sequence[Span], ranks: Sequence[ProcessTrace]) -> list[Event]:
    """Events in Chrome's trace format, with all times on the controller's clock, in us since the first of them."""
    tracks = [(layout.ep, "controller", list(controller), "")]
    for rank, (name, trace) in enumerate(zip(rank_names(layout), ranks, strict=True)):
        spans, offset = trace.spans, offset_of(trace, controller)
        moved = [s._replace(begin=s.begin - offset.offset_ns, end=s.end - offset.offset_ns) for s in spans]
        note = f", clock moved by {offset.offset_ns / 1e6:.3f} ms" if offset.offset_ns else ""
        note += f", give or take {offset.error_ns / 1e6:.3f} ms" if offset.error_ns else ""
        tracks.append((rank, name, moved, note))
    first = min((span.begin for _, _, spans, _ in tracks for span in spans), default=0)
    return [event for pid, name, spans, note in tracks for event in _events(pid, name + note, spans, first)]


def offset_of(trace: ProcessTrace, controller: Iterable[Span]) -> ClockOffset:
    """Nothing for a process of the controller's host; for another what the messages of the trace itself tell."""
    if trace.clock == clock_name():
        return ClockOffset(offset_ns=0, error_ns=0)
    sent = ((span.step, span.begin) for span in controller if span.name == SENDING)
    read = ((span.step, span.begin) for span in trace.spans if span.name == READING)
    return clock_offset(sent, read, trace.travels) or ClockOffset(offset_ns=0, error_ns=0)


def _events(pid: int, name: str, spans: Iterable[Span], first: int) -> Iterator[Event]:
    yield _metadata(pid, 0, "process_name", name=name)
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    spans = sorted(spans, key=lambda span: (span.track, span.begin, -span.end))
    for track in sorted({span.track for span in spans}):
        yield _metadata(pid, track, "thread_name", name=TRACKS[track])
        yield _metadata(pid, track, "thread_sort_index", sort_index=_order(track))
    for span in spans:
        yield {
            "ph": "X", "pid": pid, "tid": span.track, "name": span.name, "cat": _category(span),
            "ts": (span.begin - first) / 1e3, "dur": (span.end - span.begin) / 1e3, "args": {"step": span.step},
        }


def _metadata(pid: int, tid: int, kind: str, **args: str | int) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


def _order(track: int) -> int:
    """Exchanges below the track that they belong to."""
    return track if track == 0 else 2 * ((track - 1) % 3) + 1 + (track > 3)


def _category(span: Span) -> str:
    if span.track > 3:
        return "exchange"
    return "wait" if span.name.startswith("wait for ") else "work"
