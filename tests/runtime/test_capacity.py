"""How many tokens a rank may send at once: checked at start, and kept by every step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.plan import StepPlan
from runtime.rank import settle
from tests.runtime.driving import ask
from tests.runtime.test_step_planner import add, answer, planner


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        (dict(max_num_seqs=32, draft_tokens=1), 65), (dict(max_num_seqs=7, draft_tokens=3), 33),
        (dict(max_num_seqs=7, draft_tokens=2, tp=4), 7), (dict(max_num_seqs=1, draft_tokens=1), 5),
        (dict(max_num_seqs=8, draft_method="off", tp=2), 5),
    ],
)
def test_too_small_a_capacity_is_refused_with_the_number_to_set(settings: dict[str, int], least: int) -> None:
    config = EngineConfig(model=Path("none"), **settings)  # type: ignore[arg-type]
    assert config.least_capacity == least
    assert config.capacity == least + -(-config.prefill_chunk_size // config.tp)
    assert replace(config, dispatch_capacity=least).capacity == least
    with pytest.raises(ValueError, match=rf"dispatch_capacity = {least - 1}: .* need {least}"):
        replace(config, dispatch_capacity=least - 1)


def test_ranks_with_other_capacities_do_not_start() -> None:
    facts = [{"num_pages": 9, "capacity": 64}, {"num_pages": 7, "capacity": 64}, {"num_pages": 8, "capacity": 96}]
    assert settle(facts[:2]) == 7
    with pytest.raises(ValueError, match=r"rank 0 .* 64 tokens and rank 2 up to 96: set .*dispatch_capacity to 96"):
        settle(facts)


@pytest.mark.parametrize("max_step_tokens", [8, 9, 13])
def test_no_step_has_more_tokens(max_step_tokens: int) -> None:
    """The tightest limit is that of verify rows alone; prompts then wait for room, and all of them end."""
    rng = random.Random(max_step_tokens)
    steps = planner(dp=2, k=1, split="on")
    for scheduler in steps.schedulers:
        scheduler.limits = replace(scheduler.limits, max_step_tokens=max_step_tokens)
    states = [add(steps, str(i), 3 + 5 * i % 20, limit=40) for i in range(12)]
    done = 0
    while (plans := steps.schedule()) is not None:
        assert all(plan.arrays.num_tokens.sum() <= max_step_tokens for plan in plans)
        for row, _ in steps.commit([answer(plan, rng) for plan in plans]):
            if len(row.state.tokens) >= row.state.limit:
                steps.finish(row.state)
                done += 1
    assert done == len(states)


@pytest.mark.parametrize("settings", [dict(max_num_seqs=1), dict(max_num_seqs=2), dict(max_num_seqs=1, dp=2, tp=3)])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_least_capacity_lets_prompts_begin(settings: dict[str, int], k: int) -> None:
    """With so few slots, the room kept for dummies is all the room that verify rows alone would need."""
    config = EngineConfig(model=Path("none"), draft_tokens=k, draft_method="mtp" if k else "off", **settings)  # type: ignore[arg-type]
    config = replace(config, dispatch_capacity=config.least_capacity)
    steps = planner(dp=config.dp, k=k)
    for scheduler in steps.schedulers:
        scheduler.limits = replace(
            scheduler.limits, max_num_seqs=config.max_num_seqs, max_step_tokens=config.capacity * config.tp
        )
    add(steps, "a", 3)
    assert steps.schedule() is not None


def test_the_engine_plans_within_its_capacity(minnow: Path) -> None:
    engine = Engine(EngineConfig(model=minnow, max_num_seqs=4, max_model_len=64, dispatch_capacity=24))
    for i in range(4):
        engine.submit(ask(i, range(100 + i, 140), max_tokens=8))
    most = 0
    send = engine._channel.send

    def noting(plans: Sequence[StepPlan]) -> None:
        nonlocal most
        most = max(most, *(int(plan.arrays.num_tokens.sum()) for plan in plans))
        send(plans)

    engine._channel.send = noting  # type: ignore[method-assign]
    while engine.has_work():
        engine.step()
    engine.close()
    assert 16 <= most <= 24
