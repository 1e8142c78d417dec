"""`lockstep bench schedule`: what planning a steady decode step costs the host, on the real scheduler and codec."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from runtime.plan import StepPlan, StepResult, encode
from runtime.request import GenerateRequest, SamplingParams
from runtime.sampling_params import encode_params
from runtime.scheduler import Scheduler, SchedulerLimits

PAGE_SIZE = 16
VOCAB_SIZE = 1000
T = TypeVar("T")


def measure(*, num_requests: int, k: int, prompt_len: int, num_steps: int) -> dict[str, Any]:
    """Medians in microseconds over `num_steps` decode steps of `num_requests` running requests, planned one ahead."""
    for name, value in (("requests", num_requests), ("prompt-len", prompt_len), ("steps", num_steps)):
        if value < 1:
            raise ValueError(f"{name} = {value}: expected an integer >= 1")
    if k < 0:
        raise ValueError(f"draft-tokens = {k}: expected an integer >= 0")
    scheduler = _running(num_requests, k, prompt_len, num_steps)
    random = np.random.default_rng(0)
    schedule_us, encode_us, commit_us, plan_bytes = [], [], [], []
    before = _plan(scheduler)
    for _ in range(num_steps):
        plan, spent = _timed(partial(_plan, scheduler))
        schedule_us.append(spent)
        encoded, spent = _timed(partial(encode, plan))
        encode_us.append(spent)
        plan_bytes.append(len(encoded))
        commit_us.append(_timed(partial(scheduler.commit, _result(before, random)))[1])
        before = plan
    return {
        "requests": num_requests,
        "draft_tokens": k,
        "prompt_len": prompt_len,
        "steps": num_steps,
        "schedule_us_p50": _median(schedule_us),
        "encode_us_p50": _median(encode_us),
        "commit_us_p50": _median(commit_us),
        "schedule_us_p99": round(float(np.percentile(schedule_us, 99)), 1),
        "plan_bytes": int(np.median(plan_bytes)),
    }


def _running(num_requests: int, k: int, prompt_len: int, num_steps: int) -> Scheduler:
    """A scheduler whose requests have all been prefilled and will run past the last measured step."""
    max_len = prompt_len + (num_steps + 4) * (1 + k) + 1
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=num_requests, max_model_len=max_len, page_size=PAGE_SIZE,
            num_pages=1 + num_requests * -(-max_len // PAGE_SIZE), prefill_chunk_size=num_requests * prompt_len,
            k=k, lookahead=1, prefix_cache=False,
        )
    )
    sampling = SamplingParams(max_tokens=None)
    params = encode_params(sampling, prompt_len=prompt_len, default_seed=0, eos_token_ids=())
    prompt = tuple(range(prompt_len))
    for i in range(num_requests):
        request = GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling)
        scheduler.add(request, limit=max_len, params=params)
    random = np.random.default_rng(1)
    scheduler.commit(_result(_plan(scheduler), random))
    assert scheduler.num_running == num_requests
    return scheduler


def _plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def _result(plan: StepPlan, random: np.random.Generator) -> StepResult:
    """Random acceptance: each row commits 1 .. 1 + k tokens."""
    rows = plan.num_rows
    width = 1 + plan.k
    counts = random.integers(1, width + 1, rows, dtype=np.int32)
    counts[plan.num_verify :] = 1
    return StepResult(
        step_id=plan.step_id, counts=counts, token_ids=random.integers(0, VOCAB_SIZE, (rows, width), dtype=np.int32),
        bad=np.zeros(rows, np.bool_),
    )


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    """What `call` returns and the microseconds it took."""
    start = time.perf_counter_ns()
    value = call()
    return value, (time.perf_counter_ns() - start) / 1000


def _median(values: list[float]) -> float:
    return round(float(np.median(values)), 1)
