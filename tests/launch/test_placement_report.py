"""One line for a round that moved experts or failed, none for one that found all well."""

from __future__ import annotations

import pytest

from launch.placement_report import describe, report_placement, with_placement_report
from runtime.engine import Engine
from runtime.placement_round import Rebalanced
from tests.placement_runs import config
from tests.rank_threads import engine_over_threads


def test_lines() -> None:
    moved = Rebalanced(round_id=3, num_moved=12, imbalance_before=1.4, imbalance_after=1.02, elapsed_s=0.5)
    assert describe(moved) == "re-placement 3: 12 moved within 0.5 s, busiest rank 1.40 -> 1.02 of the mean"
    assert describe(Rebalanced(round_id=4)) == ""
    failed = Rebalanced(round_id=5, error="rank 1: no such file")
    assert describe(failed) == "re-placement 5 failed, they stay where they are: rank 1: no such file"


def test_the_engine_reports_its_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    engine, _ = engine_over_threads(config(dp=2, redundant_experts=4))
    try:
        seen: list[Rebalanced] = []
        assert with_placement_report(engine).balancer is engine.balancer
        assert engine.balancer is not None
        assert engine.balancer.on_round is report_placement
        engine.balancer.on_round = seen.append
        engine.balancer.forget_loads(engine.channel)
        assert engine.rebalance() == seen[0]
        assert not engine.balancer.loads.any()
    finally:
        engine.close()
    report_placement(Rebalanced(round_id=1, num_moved=2))
    assert capsys.readouterr().err == (
        "lockstep: experts: re-placement 1: 2 moved within 0.0 s, busiest rank 1.00 -> 1.00 of the mean\n"
    )


def test_an_engine_with_fixed_places_has_nothing_to_report() -> None:
    alone = Engine(config(dp=1))
    assert with_placement_report(alone) is alone
    alone.close()
