"""Spans as messages, clocks of different hosts, and a trace asked for from ranks behind real rings."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.layout import Layout
from parallel.trace import HALF_A, HOST, TRACKS, Recorder, Span
from runtime.rank_messages import TracePage, decode_control, encode_control
from runtime.sizing import Sizes
from runtime.trace import PAGE_SPANS, ClockOffset, ProcessTrace, clock_name, clock_offset, next_page, spans_of
from tests.runtime.served_threads import ThreadRanks, empty_plan


def recorder_with(num_spans: int) -> tuple[Recorder, list[Span]]:
    recorder, rng = Recorder(lambda: 99), random.Random(0)
    recorder.start()
    for i in range(num_spans):
        recorder.step = i // 3
        begin = rng.randrange(1 << 62)
        recorder.add(rng.randrange(len(TRACKS)), rng.choice(("attention", "wait for é", "")), begin, begin + i)
    return recorder, list(recorder._spans)


@pytest.mark.parametrize("num_spans", [0, 1, PAGE_SPANS, 2 * PAGE_SPANS + 1])
def test_pages_bring_all_spans_in_order(num_spans: int) -> None:
    recorder, spans = recorder_with(num_spans)
    trace = ProcessTrace()
    while not trace.is_complete:
        page = next_page(recorder, "here", is_last=recorder.num_spans <= PAGE_SPANS)
        received = decode_control(encode_control(page))
        assert isinstance(received, TracePage)
        trace.add(received, 123)
    assert trace.spans == spans
    assert trace.clock == "here"
    assert set(trace.travels) == {(99, 123)}


def test_a_page_of_nonsense_is_refused() -> None:
    recorder, _ = recorder_with(3)
    page = next_page(recorder, "here")
    short = replace(page, spans=page.spans[:-1])
    nameless = replace(page, names=[])
    for bad, text in ((short, "multiple"), (nameless, "name 0 of 0")):
        with pytest.raises(ValueError, match=text):
            spans_of(bad)


@given(
    offset=st.integers(-(10**15), 10**15),
    delays=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=20),
)
def test_the_true_offset_lies_within_the_error(offset: int, delays: list[tuple[int, int]]) -> None:
    """Whatever messages are delayed by in either direction."""
    sent = [(step, 1000 * step) for step in range(len(delays))]
    read = [(step, at + there + offset) for (step, at), (there, _) in zip(sent, delays, strict=True)]
    pages = [(at + offset, at + back) for (_, at), (_, back) in zip(sent, delays, strict=True)]
    found = clock_offset(sent, read, pages)
    assert found is not None
    assert abs(found.offset_ns - offset) <= found.error_ns + 1
    assert found.error_ns <= (min(d[0] for d in delays) + min(d[1] for d in delays)) // 2 + 1


def test_equal_delays_cancel_out() -> None:
    assert clock_offset([(0, 50)], [(0, 1060)], [(2000, 1010)]) == ClockOffset(offset_ns=1000, error_ns=10)


def test_a_direction_without_a_message_says_nothing() -> None:
    assert clock_offset([(0, 50)], [(1, 1060)], [(2000, 1010)]) is None
    assert clock_offset([(0, 50)], [(0, 1060)], []) is None


def test_processes_of_one_host_have_one_clock() -> None:
    assert clock_name() == clock_name() != ""


def test_ranks_send_what_they_noted_between_start_and_stop() -> None:
    ranks = ThreadRanks(Layout(dp=2))
    channel = ranks.channel
    channel.wait_ready()
    channel.start(Sizes(max_model_len=64, num_pages=8))

    def run(steps: range) -> None:
        for step in steps:
            channel.send([empty_plan(step), empty_plan(step)])
            channel.receive()

    run(range(3))
    channel.start_trace()
    num_steps = PAGE_SPANS  # two spans each, so that pages are sent before the stop
    run(range(3, 3 + num_steps))
    traces = channel.stop_trace()
    run(range(3 + num_steps, 5 + num_steps))
    channel.close()
    ranks.join()
    assert [trace.is_complete for trace in traces] == [True, True]
    for trace in traces:
        assert len(trace.pages) >= 2
        assert trace.clock == clock_name()
        spans = trace.spans
        assert {span.track for span in spans} == {HOST}
        reading = [span.step for span in spans if span.name == "reading the plan"]
        assert reading == list(range(3, 3 + num_steps))
        assert Counter(span.name for span in spans)["waiting for a plan"] >= num_steps - 1
        assert all(a.end <= b.begin for a, b in zip(spans, spans[1:], strict=False))


def test_a_trace_of_ranks_that_failed_has_what_came_before() -> None:
    def fail(rank: int, step: int) -> None:
        if (rank, step) == (1, 1):
            raise KeyError("lost")

    ranks = ThreadRanks(Layout(dp=2), before=fail)
    channel = ranks.channel
    channel.wait_ready()
    channel.start(Sizes(max_model_len=64, num_pages=8))
    channel.start_trace()
    channel.send([empty_plan(0), empty_plan(0)])
    channel.receive()
    channel.send([empty_plan(1), empty_plan(1)])
    with pytest.raises(RuntimeError, match="lost"):
        channel.receive()
    traces = channel.stop_trace()
    assert [trace.is_complete for trace in traces] == [False, False]
    ranks.join()


def test_a_recorder_that_is_off_costs_no_span() -> None:
    recorder = Recorder()
    recorder.track = HALF_A
    recorder.phase("target")
    assert recorder.num_spans == 0
