"""What a decode step must not do: loop over requests while planning, or read a value back from the device."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.plan import StepPlan, StepResult, encode
from runtime.scheduler import Scheduler
from tests.fakes import load_toy
from tests.runtime.driving import ask, toy_engine
from tests.runtime.simulated_rank import AcceptAll, SimulatedRank, enqueue, new_scheduler


def lines_run(function: Callable[[], Any]) -> tuple[int, Any]:
    """Number of Python lines, comprehensions' too, that a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = function()
    finally:
        sys.settrace(before)
    return count, result


def decode_lines(num_requests: int, k: int, page_size: int) -> set[tuple[int, bool]]:
    """(lines of schedule and encode, whether pages were granted) of decode steps with all requests running."""
    scheduler = new_scheduler(
        max_num_seqs=num_requests, max_model_len=64, page_size=page_size, num_pages=64 * num_requests + 1, k=k,
        prefill_chunk_size=10**6,
    )
    rank = SimulatedRank(scheduler, AcceptAll())
    for i in range(num_requests):
        enqueue(scheduler, [i % 50, 1, 2], 60)
    rank.step()
    rank.step()
    found = set()
    for _ in range(6):
        lines, plan = lines_run(lambda: _plan_and_encode(scheduler))
        assert plan.num_verify == plan.num_rows == num_requests
        found.add((lines, len(plan.arrays.pages) > 0))
        rank._enter(plan)
        rank._results.append(rank._run(plan))
        rank.in_flight.popleft()
        scheduler.commit(rank._results.popleft())
    return found


def _plan_and_encode(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    encode(plan)
    return plan


@pytest.mark.parametrize(("k", "page_size"), [(0, 4), (1, 8), (3, 2)])
def test_planning_a_decode_step_runs_as_many_lines_for_64_requests_as_for_4(k: int, page_size: int) -> None:
    few, many = decode_lines(4, k, page_size), decode_lines(64, k, page_size)
    assert few == many
    assert any(granted for _, granted in few)


def test_the_line_count_sees_a_loop() -> None:
    assert lines_run(lambda: [str(i) for i in range(4)])[0] <= lines_run(lambda: [str(i) for i in range(64)])[0]

    def loop(count: int) -> None:
        for _ in range(count):
            pass

    assert lines_run(lambda: loop(64))[0] > lines_run(lambda: loop(4))[0]


class NoReadBack(TorchDispatchMode):
    """Refuses every operation whose result, or whose shape, the host has to wait for."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].removeprefix("aten::")
        assert name.strip("_") not in {refused.strip("_") for refused in self.REFUSED}, f"{name} waits for the device"
        if name.startswith("index"):
            indices = args[1] if isinstance(args[1], list | tuple) else []
            masks = [i for i in indices if isinstance(i, torch.Tensor) and i.dtype == torch.bool]
            assert not masks, "an index by a mask waits for the device"
        return func(*args, **(kwargs or {}))


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 1, "top_k": 5, "min_p": 0.02, "logprobs": 3},
    {"temperature": 0.8, "acceptance": "ratio", "seed": 2, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"logit_bias": {3: 1.0}, "min_tokens": 25, "stop_token_ids": (1,)},
)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_step_reads_nothing_back_from_the_device(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, decode steps, finishes and admissions; only the result itself is read, at the end."""
    engine = toy_engine(load_toy(draft=k > 0), draft_tokens=k, schedule="settled", debug=False, num_pages=60)
    executor = engine._channel._executor
    steps = 0

    def guarded(plan: StepPlan, publish: Callable[[StepResult], None]) -> None:
        nonlocal steps
        steps += 1
        with NoReadBack():
            run(plan, publish)

    run = executor.run
    def refuse(tensor: torch.Tensor) -> None:
        raise AssertionError("tolist waits for the device")

    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    monkeypatch.setattr(executor, "run", guarded)
    rng = random.Random(0)
    for i in range(8):
        prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
        engine.submit(ask(i, prompt, max_tokens=25 + i % 3, **SAMPLINGS[i % 4]))
    while engine.has_work():
        engine.step()
    assert steps > 15
    engine.close()


def test_the_guard_refuses_what_it_should() -> None:
    values = torch.arange(5)
    for read in (
        lambda: values[2].item(),
        lambda: int(values[0]),
        lambda: bool((values > 2).any()),
        lambda: values[values > 2],
        lambda: values.nonzero(),
    ):
        with pytest.raises(AssertionError, match="waits for the device"), NoReadBack():
            read()
