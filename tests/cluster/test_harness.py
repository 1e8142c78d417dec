"""The harness itself: what it takes for lost, repeated and different, and how it measures."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from runtime.engine import Engine
from runtime.request import FinishReason
from tests.cluster.processes import MARK, children, is_running, marked
from tests.cluster.report import Incident, Report, spread
from tests.cluster.streams import Streams, Verdict, judge
from tests.fakes import ToyModel, load_toy
from tests.runtime.driving import ask, plain_decode, toy_engine

EXPECTED = [5, 9, 2, 7, 7, 1, 3, 8, 4, 6]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (EXPECTED, Verdict()),
        (EXPECTED[:-2], Verdict(num_lost=2, differs_at=8)),
        ([*EXPECTED, 6], Verdict(num_repeated=1, differs_at=10)),
        ([*EXPECTED[:4], *EXPECTED[6:], 1, 1], Verdict(num_lost=2, differs_at=4)),
        ([*EXPECTED[:5], *EXPECTED[3:-2]], Verdict(num_repeated=2, differs_at=5)),
        ([*EXPECTED[:6], 40, 41, 42, 43], Verdict(differs_at=6)),
        ([], Verdict(num_lost=10, differs_at=0)),
    ],
)
def test_what_is_lost_and_what_is_repeated(found: list[int], verdict: Verdict) -> None:
    assert judge(found, EXPECTED) == verdict


def streams_over_toy(engine: Engine, wrong: bool = False) -> Streams:
    asked = [ask(i, [1 + i, 2, 3], max_tokens=6) for i in range(3)]
    expected = [plain_decode(ToyModel(), request)[0] for request in asked]
    if wrong:
        expected[1] = [*expected[1][:4], 49, 49]
    return Streams(engine, asked, expected)


@pytest.mark.parametrize("wrong", [False, True])
def test_streams_ask_again_and_compare_every_output(wrong: bool) -> None:
    engine = toy_engine(load_toy())
    streams = streams_over_toy(engine, wrong)
    while streams.tally.num_finished < 9:
        streams.step()
    engine.close()
    assert (streams.tally.num_lost_tokens, streams.tally.num_repeated_tokens, streams.tally.errors) == (0, 0, [])
    assert bool(streams.tally.differences) == wrong
    assert all(name.startswith("1-") for name in streams.tally.differences)


def test_a_request_that_fails_is_counted_and_asked_again() -> None:
    engine = toy_engine(load_toy())
    streams = streams_over_toy(engine)
    streams.step()
    live = engine._live["0-0"]
    engine._unsent.append(engine._end(live, live.output.fail(FinishReason.ERROR, "gone")))
    streams.step()
    assert streams.tally.errors == ["0-0: gone"]
    assert "0-1" in engine._live
    engine.close()


def test_the_longest_gap_begins_with_the_last_token_before() -> None:
    engine = toy_engine(load_toy())
    streams = streams_over_toy(engine)
    streams.times = [1.0, 2.0, 2.5, 9.5, 10.0]
    assert streams.longest_gap(3.0) == 7.0
    assert streams.longest_gap(9.7) == 0.5
    assert streams.longest_gap(11.0) == 0.0
    engine.close()


def test_a_report_counts_what_never_came() -> None:
    report = Report(kind="kill-rank", layout="")
    for detection, interruption in ((0.5, 1.0), (0.7, 3.0), (None, None), (0.6, 2.0)):
        report.incidents.append(
            Incident(
                target="", detection_s=detection, recovery_s=interruption, interruption_s=interruption, num_restarts=1
            )
        )
    figures = report.figures()
    assert figures["detection_s"] == {"p50": 0.6, "max": 0.7}
    assert figures["interruption_s"] == {"p50": 2.0, "max": 3.0}
    assert (figures["num_undetected"], figures["num_not_resumed"], figures["num_restarts"]) == (1, 1, 4)
    assert spread([]) is None


def test_processes_are_found_by_their_mark_even_when_their_parent_is_gone() -> None:
    script = "sleep 30 & echo $!"
    parent = subprocess.Popen(
        ["sh", "-c", script], env={**os.environ, MARK: "test-of-marks"}, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.wait()
    parent.stdout.close()
    assert marked("test-of-marks") == [pid]
    assert is_running(pid)
    os.kill(pid, 9)
    while is_running(pid):
        pass
    assert marked("test-of-marks") == []


def test_children_are_listed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.pid in children(os.getpid())
    process.communicate(b"\n")
    assert process.pid not in children(os.getpid())
