"""Dummy rows: what a rank runs when it has no work of its own, so that all ranks make the same calls."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from runtime.plan import StepPlan, StepResult

DUMMY_SLOT = 0


def with_dummies(plan: StepPlan, count: int) -> StepPlan:
    """The plan with `count` verify rows of slot 0 behind its own verify rows."""
    if count == 0:
        return plan
    row = {
        "slots": DUMMY_SLOT, "num_tokens": 1 + plan.k, "starts": -1, "kv_bounds": 1 + plan.k, "samples": 1, "carries": 1
    }
    arrays = {
        name: np.insert(getattr(plan.arrays, name), plan.num_verify, np.full(count, value, np.int32))
        for name, value in row.items()
    }
    return replace(plan, num_verify=plan.num_verify + count, arrays=replace(plan.arrays, **arrays))


def without_dummies(result: StepResult, begin: int, count: int) -> StepResult:
    """The result of a plan that `with_dummies` gave `count` rows from row `begin` on, without them."""
    if count == 0:
        return result
    kept: dict[str, Any] = {
        f.name: np.delete(value, np.arange(begin, begin + count), axis=0)
        for f in fields(result)
        if isinstance(value := getattr(result, f.name), np.ndarray)
    }
    return replace(result, **kept)
