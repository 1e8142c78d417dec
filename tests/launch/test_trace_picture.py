"""The picture of a step: a box for each span of the step that is asked for, in the row of its half."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter

from tests.bench.trace_picture import COLORS, Event, draw, last_step, tracks_of


def span(rank: int, track: int, name: str, ts: float, dur: float, step: int = 1) -> Event:
    return {"ph": "X", "pid": rank, "tid": track, "name": name, "ts": ts, "dur": dur, "args": {"step": step}}


EVENTS = [
    span(rank, track, name, 1000 * track + ts, dur)
    for rank in range(2)
    for track in (2, 3)
    for name, ts, dur in (("attention", 0, 400), ("experts", 500, 400), ("wait for dispatch: x & y", 520, 100))
] + [span(0, 5, "dispatch: x & y", 2400, 300)]


def boxes(events: list[Event], first: float, last: float) -> list[ET.Element]:
    root = ET.fromstring("\n".join(draw(events, first, last, "a < b")))
    found = [element for element in root.iter() if element.tag.endswith("rect")]
    return [box for box in found if any(child.tag.endswith("title") for child in box)]


def test_each_span_is_a_box_of_its_colour() -> None:
    found = boxes(EVENTS, 2000, 4000)
    colors = Counter(box.get("fill") for box in found)
    assert colors == {COLORS["attention"]: 4, COLORS["experts"]: 4, COLORS["wait"]: 4, COLORS["travels"]: 1}
    assert len({box.get("y") for box in found}) == 5  # rows: a wait lies within its part
    widths = {box.get("fill"): float(box.get("width", "")) for box in found}
    assert widths[COLORS["attention"]] == widths[COLORS["experts"]] > 3.9 * widths[COLORS["wait"]]


def test_only_what_lies_in_the_window_is_drawn() -> None:
    assert [box.get("fill") for box in boxes(EVENTS, 2000, 2300)] == [COLORS["attention"]] * 2


def test_the_last_step_with_two_halves_is_chosen() -> None:
    later = [span(0, 1, "attention", 9000, 10, step=7)]
    assert last_step([*EVENTS, *later]) == 1
    assert last_step(later) == 7
    assert tracks_of([*EVENTS, *later]) == [1, 2, 5, 3]
