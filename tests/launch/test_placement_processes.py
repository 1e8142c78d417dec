"""Experts change places in rank processes that exchange through shared memory, while requests run."""

from __future__ import annotations

import pytest

from launch.deployment import start
from runtime.engine import Engine
from tests.placement_runs import assert_same, config, move_everything, run


def test_ids_and_logits_stay_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    move_everything(monkeypatch)
    alone = Engine(config(dp=1))
    expected = run(alone)
    alone.close()
    settings = config(dp=3, redundant_experts=5)
    engine = Engine(settings, deployment=start(settings))
    try:
        assert_same(run(engine, range(1, 40, 4)), expected)
        assert engine.balancer is not None
        assert engine.balancer.last is not None
        assert engine.balancer.last.num_moved > 10
        assert_same(run(engine, range(1, 40, 7), wait=False), expected)
    finally:
        engine.close()


def test_what_does_not_fit_is_refused_before_a_rank_starts() -> None:
    with pytest.raises(ValueError, match="redundant_experts = 4: 16 .* 3 ranks of dp x tp; 2 or 5 would"):
        start(config(dp=3, redundant_experts=4))
