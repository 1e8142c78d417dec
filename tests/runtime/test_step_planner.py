"""Plans of several dp groups: the same shape of step for all, whatever each has to do."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from runtime.batch import split_rows
from runtime.config import EngineConfig, Split
from runtime.padding import DUMMY_SLOT
from runtime.plan import StepPlan, StepResult
from runtime.request import GenerateRequest, SamplingParams
from runtime.request_state import RequestState
from runtime.sampling_params import encode_params
from runtime.scheduler import SchedulerLimits
from runtime.step_planner import StepPlanner

MAX_LEN = 64


def planner(*, dp: int, k: int = 1, split: Split = "off", num_pages: int = 200, tp: int = 1) -> StepPlanner:
    config = EngineConfig(
        model=Path("none"), dp=dp, tp=tp, split=split, draft_tokens=k, draft_method="mtp" if k else "off",
        split_min_tokens=8,
    )
    limits = SchedulerLimits(
        max_num_seqs=4, max_model_len=MAX_LEN, page_size=4, num_pages=num_pages, prefill_chunk_size=8, k=k, lookahead=1,
        prefix_cache=False,
    )
    return StepPlanner(config, limits)


def add(steps: StepPlanner, name: str, prompt_len: int, limit: int = MAX_LEN) -> RequestState:
    sampling = SamplingParams(max_tokens=None)
    request = GenerateRequest(request_id=name, prompt_token_ids=tuple(range(prompt_len)), sampling=sampling)
    params = encode_params(sampling, prompt_len=prompt_len, default_seed=0, eos_token_ids=())
    return steps.add(request, limit=limit, params=params)


def answer(plan: StepPlan, rng: random.Random) -> StepResult:
    """Random acceptance; dummy rows answer, too."""
    counts = plan.arrays.samples.copy()
    for row in range(plan.num_verify):
        counts[row] = rng.randint(1, 1 + plan.k)
    tokens = np.zeros((plan.num_rows, 1 + plan.k), np.int32)
    return StepResult(step_id=plan.step_id, counts=counts, token_ids=tokens, bad=np.zeros(plan.num_rows, bool))


def shape(plan: StepPlan) -> tuple[object, ...]:
    """What the collectives over all ranks depend on."""
    return plan.step_id, plan.k, plan.split, plan.num_rows > 0, plan.num_verify > 0, plan.capacities


@pytest.mark.parametrize("split", ["off", "on", "auto"])
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("dp", [2, 4])
def test_random_traffic(dp: int, k: int, split: Split) -> None:
    """Groups with nothing to do, prompts only, short pools, aborts: the shape is one, and every request ends."""
    rng = random.Random(dp * 10 + k)
    steps = planner(dp=dp, k=k, split=split, num_pages=24)
    live: list[RequestState] = []
    added = idle_groups = splits = 0
    for _ in range(600):
        if added < 40 and rng.random() < 0.15:
            live.append(add(steps, str(added), rng.randint(1, 30), limit=rng.randint(31, MAX_LEN)))
            added += 1
        plans = steps.schedule()
        if plans is None:
            continue
        assert len({shape(plan) for plan in plans}) == 1
        for plan in plans:
            check_rows(plan)
            idle_groups += plan.num_rows > 0 and bool((plan.arrays.slots == DUMMY_SLOT).all())
            splits += plan.split
        for row, _ in steps.commit([answer(plan, rng) for plan in plans]):
            assert row.state.slot != DUMMY_SLOT
            if len(row.state.tokens) >= row.state.limit or rng.random() < 0.02:
                steps.finish(row.state)
                live.remove(row.state)
        steps.check()
    assert added == 40
    assert idle_groups > 0
    assert (splits > 0) == (split != "off")
    for state in live:
        steps.finish(state)
    while (plans := steps.schedule()) is not None:
        steps.commit([answer(plan, rng) for plan in plans])
    assert steps.pages_and_slots_in_use() == (0, 0)


def check_rows(plan: StepPlan) -> None:
    assert (plan.arrays.starts[: plan.num_verify] == -1).all()
    assert (plan.arrays.starts[plan.num_verify :] >= 0).all()
    if plan.split:
        assert plan.num_verify % 2 == 0
        rows, tokens = split_rows(plan)
        total = int(plan.arrays.num_tokens.sum())
        first = rows * (1 + plan.k) + tokens
        assert tokens == 0 or rows == plan.num_verify
        assert abs(2 * first - total) <= 2 * (1 + plan.k)
        if total == plan.num_verify * (1 + plan.k):
            assert 2 * first == total, "a decode step is cut exactly in the middle"


def test_requests_go_to_the_group_with_the_fewest() -> None:
    steps = planner(dp=3)
    assert [add(steps, str(i), 3).group for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_one_group_without_split_gets_its_plan_as_it_is() -> None:
    steps = planner(dp=1)
    add(steps, "a", 5)
    (plan,) = steps.schedule() or []
    assert plan.capacities is None
    assert plan.num_rows == 1
    assert not plan.split


@pytest.mark.parametrize(("prompt_len", "split"), [(7, False), (8, True)])
def test_auto_splits_from_the_threshold_on(prompt_len: int, split: bool) -> None:
    steps = planner(dp=2, split="auto")
    add(steps, "a", prompt_len)
    plans = steps.schedule()
    assert plans is not None
    assert [plan.split for plan in plans] == [split, split]


def test_auto_never_splits_alone() -> None:
    steps = planner(dp=1, split="auto")
    add(steps, "a", 20)
    (plan,) = steps.schedule() or []
    assert not plan.split
