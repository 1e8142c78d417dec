"""The recorder: spans by track, phases, exchanges, and nothing at all while it is off."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from parallel.trace import EXCHANGES, HALF_A, HALF_B, HOST, Recorder, Span


def ticking(limit: int = 100) -> Recorder:
    """A recorder whose clock moves on by one with each look."""
    ticks = count()
    return Recorder(lambda: next(ticks), limit)


def nothing(_: object) -> None:
    pass


def test_nothing_is_noted_before_the_start_and_after_the_stop() -> None:
    recorder = ticking()
    recorder.phase("target")
    recorder.start()
    recorder.stop()
    recorder.phase("target")
    recorder.phase("accept")
    assert recorder.take() == []
    assert not recorder.on


def test_a_phase_lasts_until_the_next_and_the_last_until_the_stop() -> None:
    recorder = ticking()
    recorder.start()
    recorder.phase("draft")  # 0
    recorder.step = 4
    recorder.phase("target")  # 1
    recorder.phase("")  # 2
    recorder.phase("accept")  # 3
    recorder.stop()  # 4
    assert recorder.take() == [
        Span(HOST, "draft", 0, 1, 4), Span(HOST, "target", 1, 2, 4), Span(HOST, "accept", 3, 4, 4)
    ]


def test_a_part_is_a_span_of_the_current_track_and_gives_exchanges_their_name() -> None:
    recorder = ticking()
    recorder.start()
    recorder.track, started = HALF_B, []

    def send(_: object) -> None:
        started.append(recorder.exchange("all_to_all on ep"))  # 1

    def receive(_: object) -> None:
        started[0].waiting()  # 4
        started[0].arrived()  # 5

    recorder.run("dispatch", send, None)  # 0 .. 2
    recorder.track = HALF_A
    recorder.run("experts", nothing, None)  # 3 .. 4
    recorder.track = HALF_B
    recorder.run("experts", receive, None)  # 5 .. 8
    name = "dispatch: all_to_all on ep"
    assert recorder.take() == [
        Span(HALF_B, "dispatch", 0, 2, -1),
        Span(HALF_A, "experts", 3, 4, -1),
        Span(HALF_B, f"wait for {name}", 6, 7, -1),
        Span(HALF_B + EXCHANGES, name, 1, 7, -1),
        Span(HALF_B, "experts", 5, 8, -1),
    ]


def test_an_exchange_of_the_host_is_only_waited_for() -> None:
    """Phases follow one another; an exchange that is on its way over several would lie across them."""
    recorder = ticking()
    recorder.start()
    exchange = recorder.exchange("all_gather on tp")
    exchange.waiting()
    exchange.arrived()
    assert recorder.take() == [Span(HOST, "wait for all_gather on tp", 1, 2, -1)]


def test_a_full_recorder_counts_what_it_drops_and_goes_on_when_it_is_emptied() -> None:
    recorder = ticking(limit=2)
    recorder.start()
    for name in ("a", "b", "c", "d"):
        recorder.run(name, nothing, None)
    assert recorder.num_dropped == 2
    assert [span.name for span in recorder.take(1)] == ["a"]
    recorder.run("e", nothing, None)
    assert [span.name for span in recorder.take()] == ["b", "e"]
    assert recorder.num_spans == 0


def test_a_new_trace_forgets_the_old_one() -> None:
    recorder = ticking(limit=1)
    recorder.start()
    recorder.run("a", nothing, None)
    recorder.run("b", nothing, None)
    recorder.start()
    assert (recorder.take(), recorder.num_dropped) == ([], 0)


def test_what_is_run_is_called_once_with_its_argument() -> None:
    seen: list[int] = []
    add: Callable[[int], None] = seen.append
    recorder = ticking()
    recorder.start()
    recorder.run("part", add, 7)
    assert seen == [7]


def test_what_a_step_that_was_cut_short_left_behind_ends_with_the_next_start() -> None:
    recorder = ticking()
    recorder.start()
    recorder.track = HALF_B

    def lost(_: object) -> None:
        raise RuntimeError("rank 1 is lost")

    with pytest.raises(RuntimeError):
        recorder.run("dispatch", lost, None)
    recorder.start()
    exchange = recorder.exchange("all_gather on tp")
    exchange.waiting()
    exchange.arrived()
    assert [(span.track, span.name) for span in recorder.take()] == [(HOST, "wait for all_gather on tp")]
