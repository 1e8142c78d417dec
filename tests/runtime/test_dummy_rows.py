"""Dummy rows and empty plans, which keep ranks without work in step: they run everything and change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime.batch import build_batch, draft_metas
from runtime.channel import Channel
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.padding import with_dummies, without_dummies
from runtime.plan import PlanArrays, StepPlan, StepResult
from runtime.plan_builder import PlanBuilder
from runtime.request import GenerateRequest, SamplingParams


class PaddingChannel:
    """Adds dummy rows to every plan and takes them out of its result."""

    def __init__(self, inner: Channel, count: int) -> None:
        self._inner, self._count, self._first = inner, count, 0

    def send(self, plans: Sequence[StepPlan]) -> None:
        (plan,) = plans
        self._first = plan.num_verify
        self._inner.send([with_dummies(plan, self._count)])

    def receive(self) -> list[StepResult]:
        return [without_dummies(result, self._first, self._count) for result in self._inner.receive()]

    def raise_failure(self) -> None:
        self._inner.raise_failure()

    def close(self) -> None:
        self._inner.close()


def generate(minnow: Path, k: int, num_dummies: int) -> list[list[int]]:
    config = EngineConfig(
        model=minnow, draft_tokens=k, draft_method="mtp" if k else "off", max_model_len=64, max_num_seqs=4,
        prefill_chunk_size=8, storage="float32", debug=True,
        schedule="settled",
    )
    engine = Engine(config)
    if num_dummies:
        engine._channel = PaddingChannel(engine._channel, num_dummies)
    streams = [
        engine.submit(GenerateRequest(request_id=str(i), prompt_token_ids=tuple(range(40 + i, 60)), sampling=sampling))
        for i, sampling in enumerate((
            SamplingParams(max_tokens=30), SamplingParams(max_tokens=60, temperature=0.7, seed=3),
            SamplingParams(max_tokens=20, repetition_penalty=1.3, logprobs=2),
        ))
    ]
    outputs = [[t for chunk in stream for t in chunk.token_ids] for stream in streams]
    while engine.has_work():
        engine.step()
    engine.close()
    return outputs


@pytest.mark.parametrize("k", [0, 1, 3])
def test_dummy_rows_change_no_ids(minnow: Path, k: int) -> None:
    assert generate(minnow, k, num_dummies=3) == generate(minnow, k, num_dummies=0)


def test_an_empty_plan_is_an_ordinary_plan(minnow: Path) -> None:
    engine = Engine(EngineConfig(model=minnow, max_model_len=64))
    none = np.zeros(0, np.int64)
    plan = PlanBuilder(1).build(
        1, verify_slots=none, verify_bounds=none, freed_slots=[], num_logprobs=np.full(4, -1, np.int64)
    )
    assert isinstance(plan.arrays, PlanArrays)
    assert plan.num_rows == 0
    engine._channel.send([plan])
    (result,) = engine._channel.receive()
    assert result.step_id == 1
    assert len(result.counts) == 0
    engine.close()


def test_no_expert_sees_a_dummy_row(minnow: Path) -> None:
    """The mask is made from the plan, for each half and for the drafter's passes."""
    engine = Engine(EngineConfig(model=minnow, max_model_len=64, draft_tokens=2, schedule="settled"))
    executor = engine._channel._executor  # type: ignore[attr-defined]
    engine.submit(GenerateRequest(request_id="a", prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=9)))
    engine.step()
    (plan,) = engine.planner.schedule() or []
    assert build_batch(plan, executor._state).metas[0].dummy is None
    padded = replace(with_dummies(plan, 3), split=True)
    batch = build_batch(padded, executor._state)
    masks = [meta.dummy.tolist() for meta in batch.metas if meta.dummy is not None]
    assert masks == [[False] * 3 + [True] * 3, [True] * 6]
    (draft,) = draft_metas(executor._state, batch, padded, 1)
    assert draft.dummy is not None
    assert draft.dummy.tolist() == [False, True, True, True]
    engine.close()
