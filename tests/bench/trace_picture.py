"""A picture of one step from a trace: for each rank what its halves do, and what travels meanwhile.

    lockstep generate ... --trace trace.json
    python tests/bench/trace_picture.py trace.json step.svg [--step N] [--from-ms A] [--ms B]

Without `--step` the last step as two halves is drawn. Waits are drawn red, over the part that waits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Event = dict[str, Any]
WIDTH, LABEL, ROW, GAP, TOP = 1200, 170, 24, 10, 56  # pixels
WHOLE, HALF_A, HALF_B, EXCHANGES = 1, 2, 3, 3  # tracks, as in parallel/trace.py
NAMES = {WHOLE: "whole pass", HALF_A: "half A", HALF_B: "half B"}
COLORS = {
    "attention": "#4c78a8", "routing": "#9ecae9", "dispatch": "#f2cf5b", "shared expert": "#88d27a",
    "experts": "#54a24b", "combine": "#b79a20", "mlp": "#83bcb6", "wait": "#e45756", "travels": "#bab0ac",
}


def tracks_of(events: Sequence[Event]) -> list[int]:
    """Each half, or the whole pass, followed by its exchanges."""
    used = {event["tid"] for event in events}
    return [tid for track in (WHOLE, HALF_A, HALF_B) for tid in (track, track + EXCHANGES) if tid in used]


def last_step(events: Sequence[Event]) -> int:
    split = [int(event["args"]["step"]) for event in events if event["tid"] == HALF_B]
    return max(split or [int(event["args"]["step"]) for event in events if event["tid"] == WHOLE])


def color_of(event: Event) -> str:
    if event["tid"] > EXCHANGES:
        return COLORS["travels"]
    return COLORS["wait"] if event["name"].startswith("wait for ") else COLORS.get(event["name"], "#d0d0d0")


def draw(events: Sequence[Event], first_us: float, last_us: float, title: str) -> Iterator[str]:
    """Lines of the picture. `events` are those of one step's passes."""
    ranks = sorted({event["pid"] for event in events})
    tracks = tracks_of(events)
    row_of = {(rank, track): i for i, (rank, track) in enumerate((r, t) for r in ranks for t in tracks)}
    height = TOP + len(row_of) * ROW + len(ranks) * GAP + 46
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">'
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    yield f'<text x="8" y="20" font-size="14">{escape(title)}</text>'
    yield from legend()

    def y(rank: int, track: int) -> float:
        return TOP + row_of[rank, track] * ROW + ranks.index(rank) * GAP

    def x(us: float) -> float:
        return LABEL + (min(max(us, first_us), last_us) - first_us) / (last_us - first_us) * (WIDTH - LABEL - 10)

    for rank, track in row_of:
        name = NAMES[track] if track <= EXCHANGES else "its exchanges"
        text = f"rank {rank}, {name}"
        yield f'<text x="8" y="{y(rank, track) + 16:.0f}" font-size="12">{text}</text>'
    for event in sorted(events, key=lambda e: -e["dur"]):  # what lies within another is drawn over it
        begin, end = event["ts"], event["ts"] + event["dur"]
        if end < first_us or begin > last_us:
            continue
        inset = 7 if event["tid"] > EXCHANGES else 2
        yield (
            f'<rect x="{x(begin):.1f}" y="{y(event["pid"], event["tid"]) + inset:.0f}" '
            f'width="{max(x(end) - x(begin), 0.5):.1f}" height="{ROW - 2 * inset}" fill="{color_of(event)}">'
            f'<title>{escape(event["name"])}: {event["dur"] / 1e3:.2f} ms</title></rect>'
        )
    yield from scale(x, first_us, last_us, height)
    yield "</svg>"


def legend() -> Iterator[str]:
    for i, (name, color) in enumerate(COLORS.items()):
        left = LABEL + i * 110
        yield f'<rect x="{left}" y="32" width="12" height="12" fill="{color}"/>'
        yield f'<text x="{left + 16}" y="42" font-size="11">{name}</text>'


def scale(x: Any, first_us: float, last_us: float, height: int) -> Iterator[str]:
    """A mark for every round number of ms."""
    span_ms = (last_us - first_us) / 1e3
    step = next(ms for ms in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if span_ms / ms <= 15)
    for ms in range(0, int(span_ms) + 1, step):
        at = x(first_us + 1e3 * ms)
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 4}" y2="{height - 30}" stroke="#dddddd"/>'
        yield f'<text x="{at:.1f}" y="{height - 14}" font-size="11" text-anchor="middle">{ms} ms</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--from-ms", type=float, default=0.0, help="since the step's first pass began")
    parser.add_argument("--ms", type=float, help="how much to draw; all of it if left out")
    args = parser.parse_args()
    events = [e for e in json.loads(args.trace.read_text())["traceEvents"] if e["ph"] == "X" and e["tid"] >= WHOLE]
    if not events:
        sys.exit(f"{args.trace}: no pass of a rank in it")
    step = args.step if args.step is not None else last_step(events)
    events = [e for e in events if e["args"]["step"] == step]
    if not events:
        sys.exit(f"{args.trace}: no step {step}")
    begin = min(e["ts"] for e in events)
    end = max(e["ts"] + e["dur"] for e in events)
    first = begin + 1e3 * args.from_ms
    last = end if args.ms is None else first + 1e3 * args.ms
    title = f"step {step}: {(end - begin) / 1e3:.1f} ms in passes"
    args.picture.write_text("\n".join(draw(events, first, last, title)) + "\n")


if __name__ == "__main__":
    main()
