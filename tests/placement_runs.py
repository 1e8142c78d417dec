"""A small load over minnow with placed experts, and placements that move as many experts as they can."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe.balance import place_experts
from moe.placement import Placement
from runtime import replacement
from runtime.config import EngineConfig
from runtime.engine import Engine
from tests.runtime.driving import Outcome, ask

MINNOW = Path(__file__).parents[1] / "configs" / "minnow"


def config(model: Path = MINNOW, **settings: Any) -> EngineConfig:
    k = settings.pop("k", 1)
    defaults: dict[str, Any] = dict(
        storage="float32", max_model_len=64, max_num_seqs=3, prefill_chunk_size=16, page_size=4, num_pages=40,
        dispatch_capacity=256, debug=True, draft_tokens=k, draft_method="mtp" if k else "off", schedule="ahead",
    )
    return EngineConfig(model=model, **{**defaults, **settings})


def submit(engine: Engine) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for i, (length, tokens) in enumerate([(5, 9), (19, 6), (9, 7), (30, 4)]):
        name = f"request {i}"
        outcomes[name] = Outcome()
        engine.submit(
            ask(name, range(100 + 7 * i, 100 + 7 * i + length), max_tokens=tokens, temperature=0.6 * (i % 2), seed=i,
                logprobs=1)
        )
    return outcomes


def run(engine: Engine, rebalance_at: Container[int] = (), *, wait: bool = True) -> dict[str, Outcome]:
    """All of `submit` to the end, with a re-placement before the steps of these numbers."""
    outcomes = submit(engine)
    step = 0
    while engine.has_work():
        if step in rebalance_at:
            engine.rebalance(wait=wait)
        for chunk in engine.step():
            outcomes[chunk.request_id].add(chunk)
        step += 1
    return outcomes


def assert_same(found: dict[str, Outcome], expected: dict[str, Outcome]) -> None:
    """Ids equal; the target's log-probabilities, read from its logits, within 1e-5 at every position."""
    for name, outcome in expected.items():
        assert outcome.error is None
        assert found[name].error is None
        assert found[name].token_ids == outcome.token_ids
        ours = np.array([entry.logprob for entry in found[name].logprobs])
        theirs = np.array([entry.logprob for entry in outcome.logprobs])
        assert len(ours) == len(outcome.token_ids)
        assert np.abs(ours - theirs).max() <= 1e-5


def move_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round ends in another placement, whatever the loads: as many experts move as can."""
    generator = np.random.default_rng(3)

    def anything(_model: object, _per_node: int, old: Placement, _loads: object, _gain: float) -> Placement:
        loads = generator.random((len(old.layers), old.num_experts)) ** 6
        return place_experts(loads, old.layers, num_ranks=old.num_ranks, num_slots=old.num_slots)

    monkeypatch.setattr(replacement, "better_placement", anything)
