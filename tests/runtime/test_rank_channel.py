"""Plans out and results back, between a controller and rank loops on threads; and every way in which that can fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from parallel.layout import Layout
from runtime.channel import RankFailure
from runtime.plan import StepResult
from runtime.rank_loop import Served
from runtime.ring import ReaderLagging
from runtime.sizing import Sizes
from tests.runtime.served_threads import QUICK, Echo, ThreadRanks, empty_plan

SIZES = Sizes(max_model_len=64, num_pages=9)


@contextmanager
def deployed(ranks: ThreadRanks) -> Iterator[ThreadRanks]:
    try:
        yield ranks
    finally:
        ranks.channel.close()
        ranks.join()


def ids(results: list[StepResult]) -> list[list[int]]:
    return [result.token_ids[:, 0].tolist() for result in results]


def held_up(rank: int, gate: threading.Event) -> Callable[[int, int], None]:
    """Lets every step of `rank` wait for `gate`."""

    def before(which: int, step: int) -> None:
        if which == rank:
            assert gate.wait(30)

    return before


def run_steps(ranks: ThreadRanks, begin: int, end: int) -> None:
    for step in range(begin, end):
        ranks.channel.send([empty_plan(step)] * ranks.layout.dp)
        ranks.channel.receive()


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2), Layout(dp=2, tp=2)])
def test_each_group_gets_its_plan_and_its_leader_answers(layout: Layout) -> None:
    with deployed(ThreadRanks(layout)) as ranks:
        facts = ranks.channel.wait_ready()
        assert [fact["num_pages"] for fact in facts] == [10 + rank for rank in range(layout.ep)]
        ranks.channel.start(SIZES)
        for step in (1, 2, 5):
            ranks.channel.send([empty_plan(step, (10 * group + step,)) for group in range(layout.dp)])
            results = ranks.channel.receive()
            assert [r.step_id for r in results] == [step] * layout.dp
            assert ids(results) == [[10 * group + step] for group in range(layout.dp)]
            assert [r.counts.tolist() for r in results] == [[group * layout.tp] for group in range(layout.dp)]
    assert all(echo.allocated == [(64, 9)] for echo in ranks.echoes)
    assert all(echo.closed for echo in ranks.echoes)
    assert [process.code for process in ranks.processes] == [0] * layout.ep, "nobody had to be killed"


def test_steps_in_flight_come_back_in_order_whatever_the_ranks_pace() -> None:
    gate = threading.Event()
    with deployed(ThreadRanks(Layout(dp=2), before=held_up(1, gate))) as ranks:
        ranks.channel.wait_ready()
        ranks.channel.start(SIZES)
        for step in range(1, 5):
            ranks.channel.send([empty_plan(step, (step,)), empty_plan(step, (step, step))])
        gate.set()
        assert [ids(ranks.channel.receive()) for _ in range(4)] == [[[s], [s, s]] for s in range(1, 5)]


def test_after_closing_nothing_can_be_sent() -> None:
    with deployed(ThreadRanks(Layout(tp=2))) as ranks:
        ranks.channel.wait_ready()
        ranks.channel.close()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            ranks.channel.send([empty_plan(1)])


def test_a_plan_that_nobody_takes_is_not_offered_for_ever() -> None:
    class Full:
        """A ring whose readers live, and take nothing."""

        def send(self, data: bytes, timeout_s: float) -> None:
            raise ReaderLagging("ring 'plans': reader 1 is behind")

        def close(self) -> None:
            """Nothing to do."""

    ranks = ThreadRanks(Layout(tp=2), patience=replace(QUICK, step_s=0.2))
    plans = ranks.channel._plans
    with deployed(ranks), ExitStack() as stack:
        stack.callback(plans.close)
        ranks.channel.wait_ready()
        ranks.channel._plans = Full()
        message = r"^no plan can be sent: ring 'plans': reader 1 is behind$"
        with pytest.raises(RankFailure, match=message):
            ranks.channel.start(SIZES)
        with pytest.raises(RankFailure, match=message):
            ranks.channel.raise_failure()


def test_what_a_rank_raises_is_one_line_and_stays() -> None:
    def before(rank: int, step: int) -> None:
        if (rank, step) == (3, 2):
            raise KeyError("two\nlines")

    with deployed(ThreadRanks(Layout(dp=2, tp=2), before=before)) as ranks:
        ranks.channel.wait_ready()
        ranks.channel.start(SIZES)
        ranks.channel.send([empty_plan(1), empty_plan(1)])
        ranks.channel.receive()
        message = r"^rank 3 \(dp 1, tp 1\) failed in phase 'reading the plan' of step 2: KeyError: 'two\\nlines'$"
        with pytest.raises(RankFailure, match=message):
            run_steps(ranks, 2, 1000)
        for again in (ranks.channel.raise_failure, lambda: ranks.channel.send([empty_plan(4)] * 2)):
            with pytest.raises(RankFailure, match=message):
                again()
    assert all(process.killed for rank, process in enumerate(ranks.processes) if rank != 3)


def test_a_mistake_in_the_model_is_a_value_error_without_talk_of_phases() -> None:
    def build(echo: Echo) -> Served:
        if echo.rank == 1:
            raise FileNotFoundError("model.safetensors: no such file")
        return echo

    message = r"^rank 1 \(dp 0, tp 1\): model.safetensors: no such file$"
    with deployed(ThreadRanks(Layout(tp=2), build=build)) as ranks, pytest.raises(ValueError, match=message):
        ranks.channel.wait_ready()


def test_a_value_error_after_loading_is_a_failure() -> None:
    def before(rank: int, step: int) -> None:
        raise ValueError("plan 1 is damaged")

    with deployed(ThreadRanks(Layout(tp=2), before=before)) as ranks:
        ranks.channel.wait_ready()
        ranks.channel.start(SIZES)
        ranks.channel.send([empty_plan(1)])
        with pytest.raises(RankFailure, match=r"failed in phase .* of step 1: ValueError: plan 1 is damaged$"):
            ranks.channel.receive()


def test_a_step_without_end_tells_what_everybody_is_doing() -> None:
    gate = threading.Event()
    ranks = ThreadRanks(Layout(tp=2), before=held_up(0, gate), patience=replace(QUICK, step_s=0.2))
    with deployed(ranks):
        ranks.channel.wait_ready()
        ranks.channel.start(SIZES)
        ranks.channel.send([empty_plan(1, (1,))])
        message = (
            r"step 1 has not ended within \d+ s: rank 0 \(dp 0, tp 0\) in phase 'reading the plan' of step 1; "
            r"rank 1 \(dp 0, tp 1\) in phase 'waiting for a plan' of step 1"
        )
        with pytest.raises(RankFailure, match=message):
            ranks.channel.receive()
        gate.set()


def test_a_step_that_has_ended_may_wait_for_the_controller_for_ever() -> None:
    with deployed(ThreadRanks(Layout(dp=2), patience=replace(QUICK, step_s=0.1))) as ranks:
        ranks.channel.wait_ready()
        ranks.channel.start(SIZES)
        ranks.channel.send([empty_plan(1), empty_plan(1)])
        for _ in range(4):
            time.sleep(0.06)
            ranks.channel.raise_failure()
        assert [result.step_id for result in ranks.channel.receive()] == [1, 1]


def test_a_result_that_cannot_be_read_is_blamed_on_its_rank() -> None:
    class Mumbling(Echo):
        def run(self, plans: memoryview, publish: object) -> None:
            assert callable(publish)
            publish(b"mumble")

    ranks = ThreadRanks(Layout(dp=2), build=lambda echo: Mumbling(echo.rank, echo.dp_rank, echo.before))
    with deployed(ranks):
        ranks.channel.wait_ready()
        ranks.channel.start(SIZES)
        ranks.channel.send([empty_plan(1), empty_plan(1)])
        with pytest.raises(RankFailure, match=r"^rank 0 \(dp 0, tp 0\) sent what cannot be read: result of 6 bytes"):
            ranks.channel.receive()


class Digesting(Echo):
    """Writes its collectives down; rank 1 makes one more in step 3."""

    def take_digests(self) -> dict[str, int] | None:
        self.steps = getattr(self, "steps", 0) + 1
        return {"ep": self.steps + (self.rank == 1 and self.steps == 3), "tp": 0}


def test_debug_mode_names_the_rank_whose_collectives_differ() -> None:
    ranks = ThreadRanks(Layout(dp=2), build=lambda echo: Digesting(echo.rank, echo.dp_rank, echo.before))
    with deployed(ranks):
        ranks.channel.wait_ready()
        ranks.channel.start(SIZES)
        with pytest.raises(RankFailure, match="rank 1 made other collectives on ep than rank 0 in step 3"):
            run_steps(ranks, 1, 50)


def test_a_step_that_does_not_fit_in_the_ring_ends_the_engine_in_one_line() -> None:
    """The planner has counted the step: ranks that never heard of it must not get the next one."""
    with deployed(ThreadRanks(Layout(dp=2))) as ranks:
        ranks.channel.wait_ready()
        ranks.channel.start(SIZES)
        for _ in range(2):
            with pytest.raises(RankFailure, match="bytes"):
                ranks.channel.send([empty_plan(1, tuple(range(50_000))), empty_plan(1)])
