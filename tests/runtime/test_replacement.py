"""Experts change places between steps, with steps in flight, and nothing that a request sees changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from launch.generate import with_split_threshold
from runtime import replacement
from runtime.engine import Engine
from runtime.placement_round import Rebalanced
from tests.placement_runs import MINNOW, assert_same, config, move_everything, run
from tests.rank_threads import engine_over_threads
from tests.runtime.driving import Outcome, ask
from tests.runtime.test_ranks_agree import assert_ledgers_agree


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, Outcome]]:
    """By k: what one rank alone says."""
    found = {}
    for k in (0, 1, 2):
        engine = Engine(config(k=k, dp=1))
        found[k] = run(engine)
        engine.close()
    return found


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
    move_everything(monkeypatch)
    engine, channel = engine_over_threads(config(**settings))
    try:
        found = run(engine, range(1, 100))
        assert_same(found, alone[settings.get("k", 1)])
        assert engine.balancer is not None
        assert engine.balancer.last is not None
        assert engine.balancer.last.error == ""
        assert engine.balancer.last.round_id > 5
        assert engine.balancer.last.num_moved > 10
    finally:
        engine.close()
    assert_ledgers_agree(channel.ledgers, settings.get("tp", 1))


@pytest.mark.parametrize("source", ["ranks", "files"])
def test_steps_run_while_experts_are_on_their_way(
    source: str, alone: dict[int, dict[str, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the rounds: exchanges and steps take turns, and the change falls between two of them."""
    move_everything(monkeypatch)
    monkeypatch.setattr(replacement, "MOVE_VALUES", 20_000)  # two pieces an expert
    engine, channel = engine_over_threads(config(dp=2, redundant_experts=4, rebalance_steps=2, expert_source=source))
    assert engine.balancer is not None
    try:
        for _ in range(8):
            assert_same(run(engine), alone[1])
            if engine.balancer.last is not None and engine.balancer.last.round_id >= 2:
                break
        assert engine.balancer.last is not None, "no round has ended by itself"
        assert engine.balancer.last.error == ""
        assert engine.balancer.last.num_moved > 10
    finally:
        engine.close()
    assert_ledgers_agree(channel.ledgers, 1)


def test_loads_are_those_of_real_tokens_and_balance_follows_them() -> None:
    """One request alone: the other group runs dummy rows, which count nowhere."""
    counted = {}
    for layout in ("dp", "tp"):
        engine, _ = engine_over_threads(config(MINNOW, **{layout: 2}, rebalance_steps=0, k=0))
        try:
            engine.submit(ask("one", range(100, 121), max_tokens=6))
            while engine.has_work():
                engine.step()
            before = engine.rebalance()
            assert before is not None
            assert engine.balancer is not None
            counted[layout] = engine.balancer.loads
            assert before.imbalance_after < before.imbalance_before
            assert before.num_moved > 0
            assert engine.rebalance() is not None
        finally:
            engine.close()
    first, second = counted.values()
    assert np.array_equal(first, second)
    assert first.sum(1).tolist() == [4.0 * (21 + 5)] * 4, "four experts a token, in each layer"


def test_experts_that_are_already_well_placed_stay() -> None:
    engine, _ = engine_over_threads(config(dp=2, redundant_experts=4))
    try:
        run(engine)
        first = engine.rebalance()
        second = engine.rebalance()
        assert first is not None
        assert second is not None
        assert second.num_moved == 0
        assert second.imbalance_after <= first.imbalance_after + 1e-6
    finally:
        engine.close()


def test_loads_of_a_measurement_are_forgotten() -> None:
    engine, _ = engine_over_threads(config(dp=2, redundant_experts=4, k=0))
    try:
        assert engine.balancer is not None
        run(engine)
        engine.balancer.forget_loads(engine.channel)
        engine.submit(ask("one", range(900, 910), max_tokens=3))
        while engine.has_work():
            engine.step()
        engine.rebalance()
        assert engine.balancer.loads.sum(1).tolist() == [4.0 * 12] * 4
    finally:
        engine.close()


def test_experts_are_not_placed_by_a_measurement() -> None:
    """Nothing of the steps that find the split's threshold counts: not for loads, and not for when a round is due."""
    engine, _ = engine_over_threads(config(dp=2, redundant_experts=4, k=0, rebalance_steps=10))
    rounds: list[Rebalanced] = []
    try:
        assert engine.balancer is not None
        engine.balancer.on_round = rounds.append
        with_split_threshold(engine)
        for _ in range(9):
            engine.step()
        assert rounds == []
        assert not engine.balancer.is_resting
        while not rounds:
            engine.step()
        assert rounds[0].round_id == 1
        assert engine.balancer.loads.sum() == 0
    finally:
        engine.close()
