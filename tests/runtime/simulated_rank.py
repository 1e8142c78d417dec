"""A rank that computes nothing: it keeps the tables that plans describe, and holds every plan against the rules."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.plan import StepPlan, StepResult
from runtime.request import GenerateRequest, SamplingParams
from runtime.request_state import RequestState
from runtime.sampling_params import encode_params
from runtime.scheduler import CommittedRow, Scheduler, SchedulerLimits


@dataclass(frozen=True)
class _Pending:
    plan: StepPlan
    pages: frozenset[int]  # what its rows may read or write


class SimulatedRank:
    """Drives a scheduler `depth` steps ahead; how many drafts pass is drawn from `rng`.

    Tables come from plans alone. For every plan it asserts that rows have the pages they write to, that those are
    neither shared nor published, and that nothing a step in flight refers to was given to another request.
    """

    def __init__(self, scheduler: Scheduler, rng: random.Random, *, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.rng = rng
        self.depth = depth
        self.pages: dict[int, dict[int, int]] = {}  # slot -> index -> page
        self.committed: dict[int, int] = {}
        self.limit: dict[int, int] = {}
        self.cap: dict[int, int] = {}
        self.bad_slots: set[int] = set()
        self.in_flight: deque[_Pending] = deque()
        self.plans: list[StepPlan] = []
        self._results: deque[StepResult] = deque()

    def step(self) -> list[CommittedRow]:
        """Schedule, run, and commit the oldest step once more than `depth` are in flight."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self._enter(plan)
            self._results.append(self._run(plan))
        if not self._results or (plan is not None and len(self._results) <= self.depth):
            return []
        self.in_flight.popleft()
        rows = self.scheduler.commit(self._results.popleft())
        self.scheduler.check()
        return rows

    def _enter(self, plan: StepPlan) -> None:
        arrays = plan.arrays
        busy_slots = {slot for pending in self.in_flight for slot in pending.plan.arrays.slots.tolist()}
        busy_pages = frozenset[int]().union(*(pending.pages for pending in self.in_flight))
        for slot in arrays.freed_slots.tolist():
            del self.pages[slot], self.committed[slot], self.limit[slot]
        starts = dict(zip(arrays.slots.tolist(), arrays.starts.tolist(), strict=True))
        lengths = np.diff(arrays.new_cu_tokens).tolist()
        for slot, limit, length in zip(arrays.new_slots.tolist(), arrays.new_limits.tolist(), lengths, strict=True):
            assert slot not in busy_slots, "a slot was reused while a step in flight refers to it"
            assert slot not in self.pages, "a slot was given out twice"
            self.pages[slot], self.committed[slot], self.limit[slot] = {}, length, limit
        size = self.scheduler.limits.page_size
        held = {page for table in self.pages.values() for page in table.values()}
        grants = (arrays.page_slots.tolist(), arrays.page_index.tolist(), arrays.pages.tolist())
        for slot, index, page in zip(*grants, strict=True):
            shared = slot in arrays.new_slots and index < starts[slot] // size
            assert index not in self.pages[slot], "a page table entry was granted twice"
            assert page > 0
            assert shared or page not in busy_pages, "a page was reused while a step in flight refers to it"
            assert shared or page not in held, "a page was granted twice"
            self.pages[slot][index] = page
            held.add(page)
        used = frozenset(page for slot in arrays.slots.tolist() for page in self.pages[slot].values())
        self.in_flight.append(_Pending(plan, used))

    def _run(self, plan: StepPlan) -> StepResult:
        arrays, k = plan.arrays, plan.k
        counts = np.zeros(plan.num_rows, np.int32)
        bad = np.zeros(plan.num_rows, bool)
        assert len(set(arrays.slots.tolist())) == plan.num_rows, "a slot has two rows"
        for row, slot in enumerate(arrays.slots.tolist()):
            bad[row] = slot in self.bad_slots
            if row < plan.num_verify:
                begin = self.committed[slot] - 1
                end = begin + 1 + k
                room = max(min(self.limit[slot] - self.committed[slot] - 1, k), 0)
                counts[row] = 1 + self.rng.randint(0, room)
            else:
                begin, end = int(arrays.starts[row]), int(arrays.starts[row] + arrays.num_tokens[row])
                counts[row] = arrays.samples[row]
                assert end <= self.committed[slot]
            assert min(end, self.limit[slot]) <= arrays.kv_bounds[row] or self.committed[slot] >= self.limit[slot]
            self._check_writes(slot, begin, min(end, self.limit[slot]))
            self.committed[slot] = min(self.committed[slot] + int(counts[row]), self.limit[slot])
        token_ids = np.array([[self.rng.randrange(4) for _ in range(1 + k)] for _ in counts], np.int32)
        return StepResult(step_id=plan.step_id, counts=counts, token_ids=token_ids.reshape(-1, 1 + k), bad=bad)

    def _check_writes(self, slot: int, begin: int, end: int) -> None:
        size = self.scheduler.limits.page_size
        for index in {position // size for position in range(begin, end)}:
            page = self.pages[slot].get(index)
            assert page is not None, "a row writes to a page that its slot does not have"
            owners = [other for other, table in self.pages.items() if page in table.values()]
            assert owners == [slot], "a row writes to a shared page"
            assert page not in self.scheduler.slots.pool._hash_of_page, "a row writes to a published page"


class AcceptAll(random.Random):
    """Every draft passes."""

    def randint(self, a: int, b: int) -> int:
        return b


def new_scheduler(**limits: int | bool) -> Scheduler:
    defaults = dict(
        max_num_seqs=4, max_model_len=64, page_size=4, num_pages=40, prefill_chunk_size=16, k=1, lookahead=1,
        prefix_cache=True,
    )
    return Scheduler(SchedulerLimits(**{**defaults, **limits}))  # type: ignore[arg-type]


def enqueue(
    scheduler: Scheduler, prompt: Sequence[int], max_tokens: int, *, draft_tokens: int | None = None
) -> RequestState:
    sampling = SamplingParams(max_tokens=max_tokens, draft_tokens=draft_tokens)
    params = encode_params(sampling, prompt_len=len(prompt), default_seed=0, eos_token_ids=())
    request = GenerateRequest(request_id="", prompt_token_ids=tuple(prompt), sampling=sampling)
    limit = min(len(prompt) + max_tokens, scheduler.limits.max_model_len)
    return scheduler.add(request, limit=limit, params=params)
