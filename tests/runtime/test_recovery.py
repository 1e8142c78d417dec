"""Limits on restarts, and what the engine does when its ranks are lost: chunks, aborts, second failures, giving up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.channel import Channel, RankFailure
from runtime.config import EngineConfig
from runtime.engine import Deployment, Engine
from runtime.recovery import CannotRecover, Recovery, RecoveryEvent, RestartBudget, RestartLimits
from runtime.request import FinishReason
from runtime.sizing import choose_sizes
from runtime.trace import ProcessTrace
from tests.fakes import ToyModel, load_toy
from tests.runtime.driving import Outcome, ask, plain_decode, run_all
from tests.runtime.failing_channel import FailingChannel, GroupsChannel, Strikes, failing_toy
from tests.runtime.test_split_calibration import VirtualRanks


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def config(**settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = dict(
        max_num_seqs=4, page_size=4, prefill_chunk_size=8, debug=True, max_model_len=96, schedule="ahead"
    )
    return EngineConfig(model=Path("toy"), **{**defaults, **settings})


def test_a_budget_counts_over_a_sliding_window() -> None:
    clock = Clock()
    budget = RestartBudget(RestartLimits(max_restarts=2, window_s=10.0), clock)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    clock.now = 9.9
    assert not budget.take()
    clock.now = 10.0
    assert budget.num_recent == 0, "the refused ones do not count"
    assert [budget.take() for _ in range(3)] == [True, True, False]
    clock.now = 15.0
    assert not budget.take()


def test_no_restart_is_never() -> None:
    assert not RestartBudget(RestartLimits(max_restarts=0), Clock()).take()


@pytest.mark.parametrize("wrong", [dict(max_restarts=-1), dict(window_s=0.0), dict(window_s=-3.0)])
def test_limits_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        RestartLimits(**wrong)


def test_without_a_way_to_new_ranks_the_failure_itself_comes() -> None:
    failure = RankFailure("rank 1 was killed")
    with pytest.raises(RankFailure) as found:
        Recovery(None, RestartLimits()).renew(failure)
    assert found.value is failure


def recovery(
    outcomes: list[BaseException | Channel], limits: RestartLimits, clock: Clock
) -> tuple[Recovery, list[RecoveryEvent]]:
    """Each attempt takes a second and has the next of `outcomes`."""
    events: list[RecoveryEvent] = []

    def attempt() -> Channel:
        clock.now += 1.0
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return Recovery(attempt, limits, on_event=events.append, clock=clock), events


def test_attempts_that_fail_are_restarts_too() -> None:
    channel = GroupsChannel(())
    found, events = recovery([RankFailure("again"), channel], RestartLimits(max_restarts=2), Clock())
    assert found.renew(RankFailure("once")) is channel
    assert [(e.stage, e.message, e.num_restarts, e.elapsed_s) for e in events] == [
        ("lost", "once", 1, 0.0), ("lost", "again", 2, 1.0), ("recovered", "the ranks are back", 2, 2.0),
    ]
    for _ in range(2):  # given up once, given up for ever
        with pytest.raises(RankFailure, match="third; given up after 2 restarts within 600 s"):
            found.renew(RankFailure("third"))
    assert [e.stage for e in events[3:]] == ["given_up"]


def test_old_restarts_are_forgotten() -> None:
    clock, channel = Clock(), GroupsChannel(())
    found, _ = recovery([channel] * 3, RestartLimits(max_restarts=1, window_s=5.0), clock)
    for _ in range(3):
        assert found.renew(RankFailure("x")) is channel
        clock.now += 5.0


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CannotRecover("no replacement for rank 2 within 60 s"), "no replacement for rank 2 within 60 s"),
        (ValueError("weights are gone"), "killed; the ranks cannot be started again: weights are gone"),
        (FileNotFoundError("no python"), "killed; the ranks cannot be started again: no python"),
    ],
)
def test_what_another_attempt_does_not_mend_ends_it_at_once(error: BaseException, message: str) -> None:
    found, events = recovery([error], RestartLimits(max_restarts=5), Clock())
    for _ in range(2):
        with pytest.raises(RankFailure, match=message):
            found.renew(RankFailure("killed"))
    assert [e.stage for e in events] == ["lost", "given_up"]


def drain(engine: Engine, found: dict[str, Outcome]) -> dict[str, Outcome]:
    while engine.has_work():
        for chunk in engine.step():
            found[chunk.request_id].add(chunk)
    assert engine.pages_and_slots_in_use() == (0, 0)
    engine.close()
    return found


REQUESTS = [ask(name, range(1, 4 + 9 * i), max_tokens=12) for i, name in enumerate("abc")]
PLAIN = {r.request_id: plain_decode(ToyModel(), r)[0] for r in REQUESTS}


def submit_all(engine: Engine) -> dict[str, Outcome]:
    for request in REQUESTS:
        engine.submit(request)
    return {request.request_id: Outcome() for request in REQUESTS}


@pytest.mark.parametrize("schedule", ["ahead", "settled"])
def test_chunks_that_were_ready_come_before_new_ranks_are_looked_for(schedule: str) -> None:
    """Of a request aborted just before: it ends as it was told to, once, and needs no rank."""
    engine, strikes = failing_toy(config(schedule=schedule), load_toy(), calls=[9])
    found = submit_all(engine)
    while not strikes.struck:
        engine.abort("a")
        chunks = engine.step()
        for chunk in chunks:
            found[chunk.request_id].add(chunk)
        if not strikes.struck:
            found["a"] = Outcome()
            engine.submit(REQUESTS[0])
    assert [(chunk.request_id, chunk.finish_reason) for chunk in chunks] == [("a", FinishReason.ABORT)]
    assert strikes.num_attempts == 0
    assert engine.has_work()
    drain(engine, found)
    assert strikes.num_attempts == 1
    assert {name: found[name].token_ids for name in "bc"} == {name: PLAIN[name] for name in "bc"}


@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.parametrize("stage", ["lost", "recovered"])
@pytest.mark.parametrize("call", [0, 4, 11])
def test_an_abort_while_ranks_are_replaced(victim: str, stage: str, call: int) -> None:
    def on_event(event: RecoveryEvent) -> None:
        if event.stage == stage:
            engine.abort(victim)
            engine.abort(victim)  # a second time: nothing

    engine, _ = failing_toy(config(), load_toy(), calls=[call], on_event=on_event)
    found = drain(engine, submit_all(engine))
    gone = found.pop(victim)
    assert gone.finish_reason is FinishReason.ABORT
    assert gone.token_ids == PLAIN[victim][: len(gone.token_ids)]
    assert {name: o.token_ids for name, o in found.items()} == {name: PLAIN[name] for name in found}


def test_a_failure_while_ranks_are_replaced() -> None:
    events: list[RecoveryEvent] = []
    engine, strikes = failing_toy(config(), load_toy(), calls=[7], attempts=[0, 1], on_event=events.append)
    found = drain(engine, submit_all(engine))
    assert {name: o.token_ids for name, o in found.items()} == PLAIN
    assert [e.stage for e in events] == ["lost", "lost", "lost", "recovered"]
    assert events[1].message == "rank 0 died at attempt 0"
    assert strikes.num_attempts == 3


def test_ranks_that_are_lost_before_anything_is_asked() -> None:
    """An idle engine gets new ranks when it is stepped, and a later request runs on them."""
    engine, strikes = failing_toy(config(), load_toy(), calls=[0, 1])
    assert not engine.has_work()
    assert engine.step() == []
    assert engine.step() == []
    assert strikes.num_attempts == 2
    found = drain(engine, submit_all(engine))
    assert {name: o.token_ids for name, o in found.items()} == PLAIN
    assert all(o.counters.num_restarts == 0 for o in found.values())


def limited(make: Callable[[], Channel], limits: RestartLimits) -> Engine:
    settings, loaded = config(), load_toy()
    deployment = Deployment(
        facts=loaded.facts, sizes=choose_sizes(settings, loaded.facts), channel=make(), bytes_read=(), recover=make,
        restarts=limits,
    )
    return Engine(settings, deployment=deployment)


def test_after_the_limit_every_request_fails_with_one_line_and_later_ones_too() -> None:
    strikes = Strikes(calls=frozenset(range(100)))
    engine = limited(lambda: FailingChannel(GroupsChannel(()), strikes), RestartLimits(max_restarts=3, window_s=60))
    found = submit_all(engine)
    message = "rank 1 was killed at call 3; given up after 3 restarts within 60 s (max_restarts = 3)"
    while engine.has_work():
        for chunk in engine.step():
            found[chunk.request_id].add(chunk)
    assert {(o.finish_reason, o.error) for o in found.values()} == {(FinishReason.ERROR, message)}
    late = engine.submit(ask("late", [1, 2], max_tokens=3))
    (chunk,) = late
    assert (chunk.finish_reason, chunk.error) == (FinishReason.ERROR, message)
    with pytest.raises(RankFailure, match="given up"):
        engine.step()
    assert len(strikes.struck) == 4
    engine.close()


def test_stats_tell_restarts_from_preemptions_and_keep_what_the_cache_held_at_first() -> None:
    engine, _ = failing_toy(config(max_num_seqs=1), load_toy(), calls=[12, 20])
    found = drain(engine, submit_all(engine))
    assert {name: o.token_ids for name, o in found.items()} == PLAIN
    assert [found[name].counters.num_restarts for name in "abc"] == [2, 0, 0]
    assert all(o.counters.num_preemptions == 0 for o in found.values())
    assert found["a"].counters.num_cached_tokens == 0


@dataclass
class TracedRanks(VirtualRanks):
    """Ranks that are lost when they are to be traced, or from the start."""

    failure: RankFailure | None = None
    is_lost_when_traced: bool = False

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def start_trace(self) -> None:
        if self.is_lost_when_traced:
            self.failure = RankFailure("rank 0 is lost again")
            raise self.failure

    def stop_trace(self) -> list[ProcessTrace]:
        return []


def test_ranks_that_are_lost_when_their_trace_starts_are_replaced_like_others() -> None:
    def cost(_tokens: int, _split: bool) -> float:
        return 1.0

    lost = TracedRanks(cost, failure=RankFailure("rank 0 is lost"))
    others = iter([TracedRanks(cost, is_lost_when_traced=True), TracedRanks(cost)])
    loaded, settings = load_toy(), config()
    engine = Engine(settings, deployment=Deployment(
        facts=loaded.facts, sizes=choose_sizes(settings, loaded.facts), channel=lost, bytes_read=(),
        recover=lambda: next(others), restarts=RestartLimits(),
    ))
    engine.trace.start()
    outcomes = run_all(engine, [ask("a", [1, 2, 3], max_tokens=4, ignore_eos=True)])
    assert outcomes["a"].error is None
    assert len(outcomes["a"].token_ids) == 4
