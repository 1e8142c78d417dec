"""The trace of a whole run: every rank and half, what the issue asks to see, spans that lie within one another."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from launch.cli import run_command
from launch.trace_file import READING, SENDING, merge
from parallel.layout import Layout
from parallel.trace import HALF_A, HALF_B, HOST, Recorder, Span
from runtime.trace import ProcessTrace, clock_name, next_page

MINNOW = Path(__file__).resolve().parents[2] / "configs" / "minnow"
LAYER_PARTS = {"attention", "routing", "dispatch", "experts", "combine", "shared expert", "mlp"}
PHASES = {"draft", "target", "accept", "drafter", "reading the plan", "waiting for a plan"}
PLANNING = {"planning", "sending the plan", "waiting for results", "committing"}


def generate(path: Path, *flags: str) -> list[dict[str, Any]]:
    code = run_command([
        "generate", "one prompt", "and another", "--max-tokens", "6", "--set", f"model.path={MINNOW}", "--json",
        "--trace", str(path), *flags,
    ])
    assert code == 0
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def names(events: list[dict[str, Any]], pid: int, tid: int) -> set[str]:
    return {e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)}


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Spans of a track lie within one another or apart: viewers draw nothing else."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_ends: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-6
            open_ends.append(end)


def test_two_ranks_and_two_halves(tmp_path: Path) -> None:
    events = generate(tmp_path / "trace.json", "--dp", "2", "--split")
    for rank in range(2):
        assert names(events, rank, HOST) >= PHASES
        for half in (HALF_A, HALF_B):
            assert names(events, rank, half) >= LAYER_PARTS
            assert any("all_to_all" in name for name in names(events, rank, half + 3))
            assert any(name.startswith("wait for ") for name in names(events, rank, half))
    assert names(events, 2, HOST) >= PLANNING
    check_nesting(events)
    shown = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert shown == {"rank 0 (dp 0, tp 0)", "rank 1 (dp 1, tp 0)", "controller"}
    layers = [e for e in events if e["name"] == "experts" and e["pid"] == 0]
    targets = [e for e in events if e["name"] in ("target", "drafter", "draft") and e["pid"] == 0]
    for layer in layers:
        inside = [t for t in targets if t["ts"] <= layer["ts"] and layer["ts"] + layer["dur"] <= t["ts"] + t["dur"]]
        assert len(inside) == 1
        assert inside[0]["args"]["step"] == layer["args"]["step"]


def test_one_process(tmp_path: Path) -> None:
    events = generate(tmp_path / "trace.json")
    assert {"target", "accept", "drafter", "draft"} <= names(events, 0, HOST)
    assert names(events, 0, 1) >= LAYER_PARTS
    assert names(events, 1, HOST) >= PLANNING
    check_nesting(events)


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_command([
        "generate", "x", "--set", f"model.path={MINNOW}", "--trace", str(tmp_path / "missing" / "trace.json")
    ])
    assert code == 2
    assert "missing" in capsys.readouterr().err


def test_times_of_another_host_are_moved_to_the_controllers_clock() -> None:
    """A rank whose clock is an hour ahead; plans take 1 ms, results 3 ms."""
    ahead, ms = 3_600_000_000_000, 1_000_000
    controller = [Span(HOST, SENDING, 10 * ms, 11 * ms, 5)]
    recorder = Recorder(lambda: 20 * ms + ahead)
    recorder.start()
    recorder.step = 5
    recorder.add(HOST, READING, 11 * ms + ahead, 12 * ms + ahead)
    trace = ProcessTrace()
    trace.add(next_page(recorder, "another clock", is_last=True), 23 * ms)
    events = merge(Layout(), controller, [trace])
    (reading,) = (e for e in events if e["name"] == READING)
    assert reading["ts"] == pytest.approx(2000)  # one of the two ms that the directions differ by
    (name,) = (e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] == 0)
    assert "clock moved by 3599999.000 ms, give or take 2.000 ms" in name


def test_times_of_this_host_stay_as_they_are() -> None:
    recorder = Recorder(lambda: 0)
    recorder.start()
    recorder.add(HOST, READING, 500, 900)
    trace = ProcessTrace()
    trace.add(next_page(recorder, clock_name(), is_last=True), 10**9)
    events = merge(Layout(), [Span(HOST, SENDING, 100, 200, 0)], [trace])
    assert [e["ts"] for e in events if e["name"] == READING] == [0.4]
