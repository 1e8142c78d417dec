"""schedule() -> StepPlan; commit(result). Knows lengths only as bounds while steps are in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.config import padded_rows
from runtime.plan import Int32Array, StepPlan, StepResult
from runtime.plan_builder import PlanBuilder
from runtime.request import GenerateRequest
from runtime.request_state import RequestState
from runtime.sampling_params import EncodedParams
from runtime.slots import SlotArray, SlotTables

_NO_SLOTS: SlotArray = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Sizes the scheduler plans within. `lookahead`: tokens after a page that its contents depend on (drafter's)."""

    max_num_seqs: int
    max_model_len: int
    page_size: int
    num_pages: int
    prefill_chunk_size: int
    k: int
    lookahead: int
    prefix_cache: bool
    max_step_tokens: int | None = None  # verify and prefill tokens of one step, dummies included


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedRow:
    """Tokens that a retired step adds to one live request; `bad` rows carry none."""

    state: RequestState
    token_ids: list[int]
    row: int
    verified: bool  # a verify row; else the first token, from the end of the prompt
    drafted: int
    bad: bool


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    slots: SlotArray
    epochs: NDArray[np.int64]
    min_advance: Int32Array
    max_advance: Int32Array
    num_verify: int
    chunk_ends: Int32Array  # position after the chunk of each prefill row


class Scheduler:
    """First come, first served; running requests first, then prompts in chunks; the latest arrival yields its pages."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.slots = _empty_tables(limits)
        self.waiting: deque[RequestState] = deque()
        self._prefilling: list[RequestState] = []
        self._state_of_slot: list[RequestState | None] = [None] * (limits.max_num_seqs + 1)
        self._in_flight: deque[_InFlight] = deque()
        self._freed_slots: list[int] = []
        self._last_step = 0
        self._retired_step = 0
        self._arrivals = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    def add(self, request: GenerateRequest, *, limit: int, params: EncodedParams, group: int = 0) -> RequestState:
        """Queue a request that ends at `limit` committed tokens at the latest; `group` is this scheduler's."""
        state = RequestState(
            request=request, group=group, arrival=self._arrivals, limit=limit, params=params,
            tokens=list(request.prompt_token_ids),
        )
        self._arrivals += 1
        self.waiting.append(state)
        return state

    @property
    def num_running(self) -> int:
        return int((self.slots.arrival >= 0).sum())

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.num_running > 0

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + self.num_running

    def schedule_nothing(self) -> StepPlan:
        """A step without rows, for when another group has work; pages and slots given up travel with it."""
        return self._publishable(PlanBuilder(self.limits.k), _NO_SLOTS, _NO_SLOTS)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a step in flight retires."""
        builder = PlanBuilder(self.limits.k)
        rows, bounds, short = self._plan_verify_rows(builder)
        self._plan_prefill_rows(builder, self._prefill_budget(len(rows)), admit=not short)
        if builder.num_rows + len(rows) == 0:
            assert self._in_flight or not self.has_work, "requests wait but no step can run"
            return None
        return self._publishable(builder, rows, bounds)

    def _publishable(self, builder: PlanBuilder, rows: SlotArray, bounds: NDArray[np.int64]) -> StepPlan:
        self._last_step += 1
        plan = builder.build(
            self._last_step, verify_slots=rows, verify_bounds=bounds, freed_slots=self._freed_slots,
            num_logprobs=self.slots.num_logprobs,
        )
        self._freed_slots = []
        self._note_in_flight(plan)
        return plan

    def commit(self, result: StepResult) -> list[CommittedRow]:
        """Enter the counts of the oldest step in flight; rows of requests that ended meanwhile are discarded."""
        step = self._in_flight.popleft()
        assert result.step_id == self._retired_step + 1, (result.step_id, self._retired_step)
        self._retired_step = result.step_id
        tables = self.slots
        live = tables.epoch[step.slots] == step.epochs
        slots = step.slots[live]
        tables.in_flight_min[slots] -= step.min_advance[live]
        tables.in_flight_max[slots] -= step.max_advance[live]
        room = np.minimum(tables.limit - tables.committed - 1, tables.draft_cap)[step.slots]
        drafted = np.where(np.arange(len(live)) < step.num_verify, np.clip(room, 0, self.limits.k), 0)
        tables.committed[slots] += np.where(result.bad[live], 0, result.counts[live])
        tables.retire(result.step_id)
        committed: list[CommittedRow] = []
        counts, bad, token_ids = result.counts.tolist(), result.bad.tolist(), result.token_ids.tolist()
        for row in np.flatnonzero(live).tolist():
            if counts[row] == 0 and not bad[row]:
                continue
            state = self._state_of_slot[step.slots[row]]
            assert state is not None
            tokens = [] if bad[row] else token_ids[row][: counts[row]]
            state.tokens += tokens
            committed.append(
                CommittedRow(
                    state=state, token_ids=tokens, row=row, verified=row < step.num_verify, drafted=int(drafted[row]),
                    bad=bad[row],
                )
            )
        if self.limits.prefix_cache:
            self._publish(step, live & ~result.bad)
        return committed

    def finish(self, state: RequestState) -> None:
        """Forget a request, wherever it is. Its pages and slot return when no step in flight refers to them."""
        if state.slot < 0:
            self.waiting.remove(state)
            return
        self._release(state)

    def restart(self) -> None:
        """Begin anew with ranks that hold nothing: no step is in flight, no page is published, no slot is held.

        Running requests wait again, in the order of arrival and with nothing but their tokens, as after a preemption.
        Step numbers go on.
        """
        running = [state for state in self._state_of_slot if state is not None]
        for state in running:
            state.slot = -1
            state.num_restarts += 1
        self.waiting = deque(sorted([*running, *self.waiting], key=lambda state: state.arrival))
        self.slots = _empty_tables(self.limits)
        self._state_of_slot = [None] * len(self._state_of_slot)
        self._prefilling.clear()
        self._in_flight.clear()
        self._freed_slots = []
        self._retired_step = self._last_step

    def check(self) -> None:
        """Assert the integrity of pages and slots (tests and debug mode)."""
        self.slots.check()
        for slot in np.flatnonzero(self.slots.arrival >= 0).tolist():
            state = self._state_of_slot[slot]
            assert state is not None
            assert state.slot == slot
            assert self.slots.committed[slot] == len(state.tokens)

    def _plan_verify_rows(self, builder: PlanBuilder) -> tuple[SlotArray, NDArray[np.int64], bool]:
        """Slots and bounds of the verify rows, and whether pages were short: what was preempted must then not come
        straight back for the pages that it gave up."""
        tables = self.slots
        rows = np.flatnonzero(tables.decoding & (tables.committed + tables.in_flight_min < tables.limit))
        bounds = self._bounds(rows)
        need = np.maximum(tables.pages_for(bounds) - tables.num_pages[rows], 0)
        short = bool(need.sum() > tables.pool.num_available)
        if short:
            rows = self._make_room(rows, need)
            bounds = self._bounds(rows)
            need = np.maximum(tables.pages_for(bounds) - tables.num_pages[rows], 0)
        if need.any():
            builder.add_pages(*tables.grow(rows, need))
        return rows, bounds, short

    def _bounds(self, rows: SlotArray) -> NDArray[np.int64]:
        """Positions that a verify row of each slot can reach: one more than its last draft's, within its limit."""
        tables = self.slots
        reach = tables.committed + tables.in_flight_max + self.limits.k
        bounds: NDArray[np.int64] = np.minimum(reach, tables.limit)[rows]
        return bounds

    def _make_room(self, rows: SlotArray, need: NDArray[np.int64]) -> SlotArray:
        """Preempt the latest arrivals until the rest fits; returns the rows that fit right now, oldest first."""
        tables = self.slots
        order = np.argsort(tables.arrival[rows])
        rows, need = rows[order], need[order]
        while need.sum() > tables.pool.num_available + tables.num_fenced_pages:
            victim = int(np.argmax(tables.arrival))
            self._preempt(victim)
            kept = rows != victim
            rows, need = rows[kept], need[kept]
        fitting: SlotArray = rows[(np.cumsum(need) <= tables.pool.num_available) | (need == 0)]
        return fitting

    def _preempt(self, slot: int) -> None:
        state = self._state_of_slot[slot]
        assert state is not None
        self._release(state)
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(state)

    def _release(self, state: RequestState) -> None:
        if state in self._prefilling:
            self._prefilling.remove(state)
        self._freed_slots.append(state.slot)
        self._state_of_slot[state.slot] = None
        self.slots.let_go(state.slot, self._last_step, self._retired_step)
        state.slot = -1

    def _prefill_budget(self, num_verify: int) -> int:
        limits = self.limits
        if limits.max_step_tokens is None:
            return limits.prefill_chunk_size
        return min(limits.prefill_chunk_size, limits.max_step_tokens - padded_rows(num_verify) * (1 + limits.k))

    def _plan_prefill_rows(self, builder: PlanBuilder, budget: int, *, admit: bool) -> None:
        for state in list(self._prefilling):
            if budget == 0:
                return
            budget -= self._plan_chunk(builder, state, budget)
        while admit and budget > 0 and self.waiting and self.slots.num_free_slots:
            state = self.waiting[0]
            if not self._admit(builder, state):
                return
            self.waiting.popleft()
            self._prefilling.append(state)
            budget -= self._plan_chunk(builder, state, budget)

    def _plan_chunk(self, builder: PlanBuilder, state: RequestState, budget: int) -> int:
        start = state.prefill_position
        count = min(budget, state.prefill_end - start)
        last = start + count == state.prefill_end
        samples = last and not state.resumes
        builder.add_prefill(state.slot, start=start, num_tokens=count, samples=samples, carries=last)
        state.prefill_position += count
        if last:
            self._prefilling.remove(state)
            self.slots.decoding[state.slot] = True
        return count

    def _admit(self, builder: PlanBuilder, state: RequestState) -> bool:
        """Give `state` a slot, the pages it shares and those its whole prefill needs; False when they do not fit."""
        limits, pool = self.limits, self.slots.pool
        total = len(state.tokens)
        end = total - 1 if state.resumes else total
        shared = self._match_prefix(state, end) if limits.prefix_cache else []
        reach = min(end + 1 + limits.k, state.limit)
        num_new = -(-reach // limits.page_size) - len(shared)
        if num_new > pool.num_available - pool.num_reclaimed(shared):
            return False
        pool.share(shared)
        slot = self.slots.acquire(
            arrival=state.arrival, committed=total, limit=state.limit, pages=np.array(shared, np.int32)
        )
        state.slot, state.prefill_end = slot, end
        state.prefill_position = len(shared) * limits.page_size
        if not (state.num_preemptions or state.num_restarts):
            state.num_cached_tokens = state.prefill_position
        self.num_prefix_queries += end
        self.num_prefix_hits += state.prefill_position
        self.slots.num_published[slot] = len(shared)
        sampling = state.request.sampling
        self.slots.draft_cap[slot] = limits.k if sampling.draft_tokens is None else min(limits.k, sampling.draft_tokens)
        self.slots.num_logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self._state_of_slot[slot] = state
        index = np.arange(len(shared))
        builder.add_pages(np.full(len(shared), slot), index, np.array(shared, np.int32))
        builder.add_pages(*self.slots.grow(np.array([slot]), np.array([num_new])))
        builder.add_request(slot, state)
        return True

    def _match_prefix(self, state: RequestState, end: int) -> list[int]:
        """Published pages that hold the beginning of `state`; its last position before `end` is always recomputed."""
        size, lookahead = self.limits.page_size, self.limits.lookahead
        num_pages = min((end - 1) // size, (len(state.tokens) - lookahead) // size)
        return self.slots.pool.match(state.hashes(num_pages, size, lookahead)) if num_pages > 0 else []

    def _note_in_flight(self, plan: StepPlan) -> None:
        arrays, tables = plan.arrays, self.slots
        slots = arrays.slots.astype(np.int64)
        min_advance = arrays.samples  # 1 for a verify row
        max_advance = arrays.samples.copy()
        max_advance[: plan.num_verify] += plan.k
        tables.in_flight_min[slots] += min_advance
        tables.in_flight_max[slots] += max_advance
        self._in_flight.append(
            _InFlight(
                slots=slots, epochs=tables.epoch[slots], min_advance=min_advance, max_advance=max_advance,
                num_verify=plan.num_verify, chunk_ends=arrays.starts + arrays.num_tokens,
            )
        )

    def _publish(self, step: _InFlight, valid: NDArray[np.bool_]) -> None:
        """Offer pages whose every position is final in both target and drafter: up to committed - 2."""
        tables, size = self.slots, self.limits.page_size
        committed = tables.committed[step.slots]
        is_verify = np.arange(len(valid)) < step.num_verify
        computed = np.where(is_verify, committed - 1, step.chunk_ends)
        final = np.minimum(computed, committed - max(self.limits.lookahead, 1))
        ready = np.where(valid, final // size, 0)
        for row in np.flatnonzero(ready > tables.num_published[step.slots]).tolist():
            slot = step.slots[row]
            state = self._state_of_slot[slot]
            assert state is not None
            hashes = state.hashes(int(ready[row]), size, self.limits.lookahead)
            for page in range(int(tables.num_published[slot]), int(ready[row])):
                tables.pool.publish(int(tables.page_table[slot, page]), hashes[page])
            tables.num_published[slot] = ready[row]


def _empty_tables(limits: SchedulerLimits) -> SlotTables:
    return SlotTables(
        num_slots=limits.max_num_seqs + 1, max_model_len=limits.max_model_len, page_size=limits.page_size,
        num_pages=limits.num_pages,
    )
