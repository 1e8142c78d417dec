"""Rank processes that are killed are started again: the same ids, no process left; without the option they are not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from launch.config import load_config
from launch.deployment import start
from launch.generate import make_engine
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.recovery import RecoveryEvent, RestartLimits
from runtime.request import FinishReason
from tests.launch.dying import children, segments
from tests.launch.forked_rank import fork_rank
from tests.runtime.driving import Outcome, ask

REQUESTS = [
    ask(0, range(100, 130), max_tokens=24, ignore_eos=True),
    ask(1, range(200, 205), max_tokens=24, ignore_eos=True, temperature=0.8, seed=3),
    ask(2, range(300, 340), max_tokens=24, ignore_eos=True, repetition_penalty=1.2, logprobs=1),
]


def config(minnow: Path, tp: int) -> EngineConfig:
    return EngineConfig(
        model=minnow, storage="float32", tp=tp, max_model_len=128, max_num_seqs=2, prefill_chunk_size=16
    )


def use_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that start fast and have no fault of their own."""
    monkeypatch.setattr("launch.deployment._start_rank", fork_rank)
    monkeypatch.setenv("FAULT", "99:never:nowhere:raise")


def run(engine: Engine, kill_after: tuple[int, ...] = (), how: signal.Signals = signal.SIGKILL) -> dict[str, Outcome]:
    """Send `how` to a rank whenever so many tokens have come in all."""
    found = {request.request_id: Outcome() for request in REQUESTS}
    due = list(kill_after)
    try:
        for request in REQUESTS:
            engine.submit(request)
        while engine.has_work():
            for chunk in engine.step():
                found[chunk.request_id].add(chunk)
            if due and sum(len(o.token_ids) for o in found.values()) >= due[0]:
                ranks = children()
                os.kill(ranks[due.pop(0) % len(ranks)], how)
    finally:
        engine.close()
    assert children() == []
    assert segments() == []
    return found


def test_killed_ranks_are_started_again_and_ids_stay(minnow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One dies in the middle of prompts, one while all decode."""
    plain = run(Engine(config(minnow, tp=1)))
    use_forks(monkeypatch)
    events: list[RecoveryEvent] = []
    deployment = start(config(minnow, tp=2), restarts=RestartLimits(max_restarts=2))
    found = run(Engine(config(minnow, tp=2), deployment=deployment, on_event=events.append), (2, 31))
    assert {i: o.token_ids for i, o in found.items()} == {i: o.token_ids for i, o in plain.items()}
    assert [entry.token_id for entry in found["2"].logprobs] == found["2"].token_ids
    assert [e.stage for e in events] == ["lost", "recovered"] * 2
    assert all("was killed by SIGKILL" in e.message for e in events[::2])
    assert max(o.counters.num_restarts for o in found.values()) == 2


def test_beyond_the_limit_every_request_fails(minnow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_forks(monkeypatch)
    deployment = start(config(minnow, tp=2), restarts=RestartLimits(max_restarts=1))
    engine = Engine(config(minnow, tp=2), deployment=deployment)
    found = run(engine, (2, 20))
    for outcome in found.values():
        if outcome.finish_reason is not FinishReason.LENGTH:
            assert outcome.finish_reason is FinishReason.ERROR
            assert "SIGKILL" in (outcome.error or "")
            assert "given up after 1 restarts within 600 s (max_restarts = 1)" in (outcome.error or "")
    assert any(o.finish_reason is FinishReason.ERROR for o in found.values())


def test_restarts_are_opted_into(minnow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [f"model.path={minnow}", "parallel.tp=2"]
    assert load_config(None, given).cluster.local_restarts() is None
    cluster = load_config(None, [*given, "cluster.max_restarts=2", "cluster.restart_window_s=30"]).cluster
    assert cluster.local_restarts() == RestartLimits(max_restarts=2, window_s=30.0)
    use_forks(monkeypatch)
    found = run(make_engine(config(minnow, tp=2)), (2,))
    assert {o.finish_reason for o in found.values()} == {FinishReason.ERROR}
    assert all((o.error or "").startswith("rank ") and "given up" not in (o.error or "") for o in found.values())
