"""One scheduler for each dp group, and what their steps must have in common: number, split, dummy rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from runtime.batch import split_rows
from runtime.config import EngineConfig
from runtime.padding import with_dummies, without_dummies
from runtime.plan import StepPlan, StepResult
from runtime.request import GenerateRequest
from runtime.request_state import RequestState
from runtime.sampling_params import EncodedParams
from runtime.scheduler import CommittedRow, Scheduler, SchedulerLimits

NEVER = 1 << 30  # tokens: more than a step can have
Committed = tuple[CommittedRow, StepResult]


class StepPlanner:
    """The engine's view of all dp groups. With one group and no split it hands plans through as they are.

    A group without verify rows gets a dummy row as soon as another one has some, so that every rank makes every call;
    a group with nothing to do at all runs dummies only, and under `split` the number of verify rows is made even.
    """

    def __init__(self, config: EngineConfig, limits: SchedulerLimits) -> None:
        self._layout = config.layout
        self._config = config
        # Of "auto". Unless somebody measures it (runtime/split_calibration.py), no split: without a network between
        # ranks there is next to nothing to hide, and two halves read the weights twice.
        self.split_min_tokens = NEVER if config.split_min_tokens is None else config.split_min_tokens
        self.schedulers = [Scheduler(limits) for _ in range(config.dp)]
        self._dummies: deque[list[tuple[int, int]]] = deque()  # of each step in flight and group: (first row, count)

    def add(self, request: GenerateRequest, *, limit: int, params: EncodedParams) -> RequestState:
        """Queue a request at the group with the fewest open ones."""
        group = min(range(len(self.schedulers)), key=lambda g: self.schedulers[g].num_open)
        return self.schedulers[group].add(request, limit=limit, params=params, group=group)

    def schedule(self) -> list[StepPlan] | None:
        """The next step, one plan for each group, or None when nothing can run before a step in flight retires."""
        plans = [scheduler.schedule() for scheduler in self.schedulers]
        if all(plan is None for plan in plans):
            return None
        filled = [
            plan if plan is not None else scheduler.schedule_nothing()
            for plan, scheduler in zip(plans, self.schedulers, strict=True)
        ]
        padded, dummies = self._agree(filled)
        self._dummies.append(dummies)
        return padded

    def commit(self, results: Sequence[StepResult]) -> list[Committed]:
        """Enter the oldest step in flight; each row with the result that its `row` counts in."""
        committed: list[Committed] = []
        dummies = self._dummies.popleft()
        for scheduler, result, (first, count) in zip(self.schedulers, results, dummies, strict=True):
            own = without_dummies(result, first, count)
            committed += [(row, own) for row in scheduler.commit(own)]
        return committed

    def finish(self, state: RequestState) -> None:
        self.schedulers[state.group].finish(state)

    def restart(self) -> None:
        """Nothing is in flight any more, and the ranks hold nothing: running requests of all groups wait again."""
        self._dummies.clear()
        for scheduler in self.schedulers:
            scheduler.restart()

    def check(self) -> None:
        for scheduler in self.schedulers:
            scheduler.check()

    def pages_and_slots_in_use(self) -> tuple[int, int]:
        tables = [scheduler.slots for scheduler in self.schedulers]
        return sum(t.pool.num_in_use for t in tables), sum(t.num_slots_in_use for t in tables)

    def _agree(self, plans: list[StepPlan]) -> tuple[list[StepPlan], list[tuple[int, int]]]:
        """Pad the plans so that they have the same shape of step."""
        split = self._splits(plans)
        several = len(plans) > 1
        # A group without any row needs a dummy, and where one group has a verify row, real or not, all need one.
        dummy_needed = several and any(plan.num_verify or not plan.num_rows for plan in plans)
        padded, dummies = [], []
        for plan in plans:
            count = int(dummy_needed and plan.num_verify == 0)
            count += split and (plan.num_verify + count) % 2
            dummies.append((plan.num_verify, count))
            padded.append(replace(with_dummies(plan, count), split=split))
        if several:
            capacities = _capacities(padded)
            padded = [replace(plan, capacities=capacities) for plan in padded]
        return padded, dummies

    def _splits(self, plans: Sequence[StepPlan]) -> bool:
        config = self._config
        if config.split != "auto":
            return config.split == "on"
        # Alone there is no communication to hide, and two halves read the weights twice.
        most = max(int(plan.arrays.num_tokens.sum()) for plan in plans) if config.layout.ep > 1 else 0
        return most >= self.split_min_tokens * config.tp


def _capacities(plans: Sequence[StepPlan]) -> tuple[int, int, int]:
    halves = []
    for plan in plans:
        total = int(plan.arrays.num_tokens.sum())
        first = total
        if plan.split:
            rows, tokens = split_rows(plan)
            first = rows * (1 + plan.k) + tokens
        halves.append((first, total - first, plan.num_verify))
    a, b, draft = (max(column) for column in zip(*halves, strict=True))
    return a, b, draft
