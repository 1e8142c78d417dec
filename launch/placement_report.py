"""A line on standard error for every re-placement of experts that moved some, or failed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.placement_round import Rebalanced


def with_placement_report(engine: Engine) -> Engine:
    """The same engine, which says when its experts have changed places."""
    if engine.balancer is not None:
        engine.balancer.on_round = report_placement
    return engine


def report_placement(round_: Rebalanced) -> None:
    line = describe(round_)
    if line:
        sys.stderr.write(f"lockstep: experts: {line}\n")


def describe(round_: Rebalanced) -> str:
    """One line; empty where there is nothing to tell."""
    if round_.error:
        return f"re-placement {round_.round_id} failed, they stay where they are: {round_.error}"
    if not round_.num_moved:
        return ""
    return (
        f"re-placement {round_.round_id}: {round_.num_moved} moved within {round_.elapsed_s:.1f} s, busiest rank "
        f"{round_.imbalance_before:.2f} -> {round_.imbalance_after:.2f} of the mean"
    )
