"""The threshold of the split: chosen from what steps take, measured through the engine, never in favour of noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import EngineConfig
from runtime.engine import Deployment, Engine
from runtime.plan import StepPlan, StepResult
from runtime.request import GenerateRequest, SamplingParams
from runtime.sizing import Sizes
from runtime.split_calibration import BLOCK, GAIN, ROUNDS, SplitPoint, calibrate_split, choose_threshold
from runtime.step_planner import NEVER
from tests.fakes import load_toy

Cost = Callable[[int, bool], float]  # (most tokens of a rank, split) -> seconds of a step


@dataclass
class VirtualRanks:
    """A channel whose steps take what `cost` says on a clock of its own; every row yields one token."""

    cost: Cost
    tp: int = 1
    now: float = 0.0
    steps: list[tuple[int, bool]] = field(default_factory=list)
    _waiting: list[Sequence[StepPlan]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def send(self, plans: Sequence[StepPlan]) -> None:
        self._waiting.append(plans)

    def receive(self) -> list[StepResult]:
        plans = self._waiting.pop(0)
        tokens = -(-max(int(plan.arrays.num_tokens.sum()) for plan in plans) // self.tp)
        assert len({plan.split for plan in plans}) == 1
        self.steps.append((tokens, plans[0].split))
        self.now += self.cost(tokens, plans[0].split)
        return [self._result(plan) for plan in plans]

    def raise_failure(self) -> None:
        """These ranks never fail."""

    def close(self) -> None:
        """Nothing to end."""

    def _result(self, plan: StepPlan) -> StepResult:
        verify = np.arange(plan.num_rows) < plan.num_verify
        return StepResult(
            step_id=plan.step_id, counts=np.where(verify, 1, plan.arrays.samples).astype(np.int32),
            token_ids=np.full((plan.num_rows, 1 + plan.k), 7, np.int32), bad=np.zeros(plan.num_rows, bool),
        )


def engine_over(ranks: VirtualRanks, **settings: Any) -> Engine:
    loaded = load_toy(max_len=512)
    config = EngineConfig(model=Path("toy"), **{"dp": 2, "max_num_seqs": 32, "page_size": 16, **settings})
    sizes = Sizes(max_model_len=config.max_model_len or 512, num_pages=config.num_pages or 512)
    return Engine(config, deployment=Deployment(facts=loaded.facts, sizes=sizes, channel=ranks, bytes_read=()))


def linear(per_token: float, latency: float) -> Cost:
    """Milliseconds: weights cost 10; two halves read them twice and hide the network's latency."""
    return lambda tokens, split: 1e-3 * (per_token * tokens + (20.0 if split else 10.0 + latency))


@pytest.mark.parametrize("schedule", ["settled", "ahead"])
@pytest.mark.parametrize("settings", [dict(), dict(dp=2, tp=2), dict(draft_tokens=3), dict(draft_method="off")])
def test_a_slow_network_pays_for_every_size(schedule: str, settings: dict[str, Any]) -> None:
    ranks = VirtualRanks(linear(0.1, 20.0), tp=settings.get("tp", 1))
    engine = engine_over(ranks, schedule=schedule, **settings)
    line = calibrate_split(engine, ranks.clock)
    k = engine.config.k
    assert engine.planner.split_min_tokens == -(-(1 + k) // ranks.tp)
    assert line is not None
    assert line.startswith(f"two halves from {engine.planner.split_min_tokens} tokens a rank on")
    assert not engine.has_work()
    assert engine.pages_and_slots_in_use() == (0, 0)


@pytest.mark.parametrize("schedule", ["settled", "ahead"])
def test_without_latency_one_size_is_tried_and_nothing_split(schedule: str) -> None:
    ranks = VirtualRanks(linear(0.1, 0.0))
    engine = engine_over(ranks, schedule=schedule)
    line = calibrate_split(engine, ranks.clock)
    assert engine.planner.split_min_tokens == NEVER
    assert line is not None
    assert line.startswith("two halves at no size measured (tokens a rank: ms a step whole / in two halves: 64: ")
    assert {tokens for tokens, split in ranks.steps if split} == {64}
    ranks.steps.clear()
    engine.submit(GenerateRequest(
        request_id="a", prompt_token_ids=tuple(range(3, 40)), sampling=SamplingParams(max_tokens=5)
    ))
    while engine.has_work():
        engine.step()
    assert not any(split for _, split in ranks.steps)


def test_the_split_begins_where_it_begins_to_pay() -> None:
    """At 11 tokens both take as long, from 13 on it is worth it; 16 is the least of the sizes measured."""
    ranks = VirtualRanks(lambda tokens, split: 1e-3 * (10.0 + (tokens if not split else 5.0 + 0.55 * tokens)))
    engine = engine_over(ranks)
    calibrate_split(engine, ranks.clock)
    assert engine.planner.split_min_tokens == 16


def test_slow_steps_are_measured_in_fewer_rounds() -> None:
    fast, slow = VirtualRanks(linear(0.1, 0.0)), VirtualRanks(linear(0.1, 0.0))
    slow.cost = lambda tokens, split: 30 * fast.cost(tokens, split)
    for ranks in (fast, slow):
        calibrate_split(engine_over(ranks), ranks.clock)
    assert len(slow.steps) < len(fast.steps)
    assert {split for _, split in slow.steps} == {False, True}


@pytest.mark.parametrize(
    "settings", [dict(prefill_chunk_size=16), dict(prefill_chunk_size=16, draft_tokens=1), dict(dispatch_capacity=70)]
)
def test_no_request_ends_while_others_are_measured_however_slowly_they_were_taken_in(settings: dict[str, Any]) -> None:
    """Two halves, which are measured after the whole, must not be measured on a smaller batch."""
    ranks = VirtualRanks(linear(0.1, 20.0))
    settings = {"draft_method": "mtp" if "draft_tokens" in settings else "off", **settings}
    engine = engine_over(ranks, max_num_seqs=64, num_pages=4096, **settings)
    calibrate_split(engine, ranks.clock)
    sizes = [tokens for tokens, _ in ranks.steps]
    least = 64 * (1 + engine.config.k)
    first = max(i for i, tokens in enumerate(sizes) if tokens > least) + 1  # no prompt is left
    assert set(sizes[first : first + 2 + 2 * ROUNDS * BLOCK]) == {least}


def test_a_small_pool_gives_fewer_requests_and_no_preemption() -> None:
    ranks = VirtualRanks(linear(0.1, 20.0))
    engine = engine_over(ranks, num_pages=30)
    calibrate_split(engine, ranks.clock)
    assert engine.planner.split_min_tokens == 2
    # Of 29 pages 4 for each of 7 requests; two halves get a dummy row.
    assert max(tokens for tokens, split in ranks.steps if split) == 2 * (7 + 1)


def test_a_short_context_leaves_nothing_to_measure() -> None:
    ranks = VirtualRanks(linear(0.1, 20.0))
    engine = engine_over(ranks, max_model_len=50)
    line = calibrate_split(engine, ranks.clock)
    assert line is not None
    assert "at no size measured" in line
    assert engine.planner.split_min_tokens == NEVER


@pytest.mark.parametrize("settings", [dict(split="on"), dict(split="off"), dict(split_min_tokens=9), dict(dp=1)])
def test_what_is_settled_is_not_measured(settings: dict[str, Any]) -> None:
    ranks = VirtualRanks(linear(0.1, 20.0))
    engine = engine_over(ranks, **settings)
    before = engine.planner.split_min_tokens
    assert calibrate_split(engine, ranks.clock) is None
    assert engine.planner.split_min_tokens == before
    assert ranks.steps == []


points = st.builds(
    SplitPoint, num_tokens=st.integers(1, 1000), whole_s=st.floats(0.1, 10.0), halves_s=st.floats(0.1, 10.0)
)


@given(st.lists(points, unique_by=lambda point: point.num_tokens))
def test_no_size_measured_is_split_to_its_loss(measured: list[SplitPoint]) -> None:
    threshold = choose_threshold(measured)
    for point in measured:
        if point.num_tokens >= threshold:
            assert point.halves_s < (1 - GAIN) * point.whole_s
    below = [point for point in measured if point.num_tokens < threshold]
    assert not below or not max(below, key=lambda point: point.num_tokens).pays


def test_a_gain_within_noise_does_not_count() -> None:
    point = SplitPoint(num_tokens=8, whole_s=1.0, halves_s=0.99)
    assert choose_threshold([point]) == NEVER
    assert choose_threshold([replace(point, halves_s=0.9)]) == 8
