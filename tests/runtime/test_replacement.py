"""Experts change places between steps, with steps in flight, and nothing that a request sees changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe.balance import place_experts
from moe.placement import Placement
from runtime import replacement
from runtime.config import EngineConfig
from runtime.engine import Engine
from tests.rank_threads import engine_over_threads
from tests.runtime.driving import Outcome, ask
from tests.runtime.test_ranks_agree import assert_ledgers_agree

MINNOW = Path(__file__).parents[2] / "configs" / "minnow"


def config(model: Path = MINNOW, **settings: Any) -> EngineConfig:
    k = settings.pop("k", 1)
    defaults: dict[str, Any] = dict(
        storage="float32", max_model_len=64, max_num_seqs=3, prefill_chunk_size=16, page_size=4, num_pages=40,
        dispatch_capacity=256, debug=True, draft_tokens=k, draft_method="mtp" if k else "off", schedule="ahead",
    )
    return EngineConfig(model=model, **{**defaults, **settings})


def submit(engine: Engine) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for i, (length, tokens) in enumerate([(5, 14), (19, 10), (9, 12), (30, 8)]):
        name = f"request {i}"
        outcomes[name] = Outcome()
        engine.submit(
            ask(name, range(100 + 7 * i, 100 + 7 * i + length), max_tokens=tokens, temperature=0.6 * (i % 2), seed=i,
                logprobs=1)
        )
    return outcomes


def run(engine: Engine, rebalance_at: set[int], *, wait: bool = True) -> dict[str, Outcome]:
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
        assert found[name].token_ids == outcome.token_ids
        ours = np.array([entry.logprob for entry in found[name].logprobs])
        theirs = np.array([entry.logprob for entry in outcome.logprobs])
        assert len(ours) == len(outcome.token_ids)
        assert np.abs(ours - theirs).max() <= 1e-5


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, Outcome]]:
    """By k: what one rank alone says."""
    found = {}
    for k in (0, 1, 2):
        engine = Engine(config(k=k, dp=1))
        found[k] = run(engine, set())
        engine.close()
    return found


def random_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round ends in another placement, whatever the loads: as many experts move as can."""
    generator = np.random.default_rng(3)

    def anything(_config: EngineConfig, _model: object, old: Placement, _loads: object, _gain: float) -> Placement:
        loads = generator.random((len(old.layers), old.num_experts)) ** 6
        return place_experts(loads, old.layers, num_ranks=old.num_ranks, num_slots=old.num_slots)

    monkeypatch.setattr(replacement, "better_placement", anything)


@pytest.mark.parametrize(
    "settings",
    [
        dict(dp=2, redundant_experts=4), dict(dp=2, redundant_experts=4, expert_source="files"),
        dict(tp=2, redundant_experts=2, split="on", k=2, dispatch="all_gather"),
        dict(dp=3, redundant_experts=2, k=0), dict(dp=2, tp=2, redundant_experts=8, split="on"),
        dict(dp=2, tp=2, redundant_experts=4, dispatch="all_gather", ranks_per_node=2, schedule="settled"),
        dict(dp=4, rebalance_steps=0, expert_source="files"),
    ],
    ids=str,
)
def test_ids_and_logits_stay_when_experts_move_before_every_step(
    settings: dict[str, Any], alone: dict[int, dict[str, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    random_placements(monkeypatch)
    engine, channel = engine_over_threads(config(**settings))
    try:
        found = run(engine, set(range(1, 100)))
        assert_same(found, alone[settings.get("k", 1)])
        assert engine.balancer is not None
        assert engine.balancer.last is not None
        assert engine.balancer.last.error == ""
        assert engine.balancer.last.round_id > 8
        assert engine.balancer.last.num_moved > 10
    finally:
        engine.close()
    assert_ledgers_agree(channel.ledgers, settings.get("tp", 1))
