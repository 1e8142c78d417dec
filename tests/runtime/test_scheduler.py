"""Plans held against the rules by a rank that computes nothing: bounds, fences, preemption, admission, late results."""

from __future__ import annotations

import random

import pytest

from runtime.plan import encode
from runtime.request_state import RequestState
from runtime.scheduler import Scheduler
from tests.runtime.simulated_rank import AcceptAll, SimulatedRank, enqueue, new_scheduler


def advance(rank: SimulatedRank, live: list[RequestState]) -> None:
    """One step; requests at their limits end and leave `live`."""
    for row in rank.step():
        assert len(row.state.tokens) <= row.state.limit
        if len(row.state.tokens) == row.state.limit:
            rank.scheduler.finish(row.state)
            live.remove(row.state)


def run(rank: SimulatedRank, live: list[RequestState], *, max_steps: int = 2000) -> None:
    """Step until all of `live` have reached their limits."""
    for _ in range(max_steps):
        advance(rank, live)
        if not live and not rank.in_flight:
            break
    assert not live, "the scheduler makes no progress"
    assert_empty(rank.scheduler)


def assert_empty(scheduler: Scheduler) -> None:
    scheduler.check()
    assert scheduler.slots.pool.num_in_use == 0
    assert scheduler.slots.num_slots_in_use == 0
    assert not scheduler.has_work


@pytest.mark.parametrize("seed", range(40))
def test_random_traffic_keeps_the_rules(seed: int) -> None:
    """Sizes, arrivals, aborts, early ends, failing slots: everything random, every plan checked by the rank."""
    rng = random.Random(seed)
    page_size, max_len = rng.choice([1, 2, 4, 8]), rng.choice([16, 33, 64])
    least = -(-max_len // page_size)
    scheduler = new_scheduler(
        max_num_seqs=rng.choice([1, 2, 4, 9]), max_model_len=max_len, page_size=page_size, k=rng.choice([0, 1, 3, 5]),
        num_pages=1 + least + rng.randrange(2 * least), prefill_chunk_size=rng.choice([1, 3, 8, 100]),
        lookahead=rng.choice([0, 1, 2]), prefix_cache=rng.random() < 0.7,
    )
    rank = SimulatedRank(scheduler, rng, depth=rng.choice([0, 1, 1, 2]))
    waiting, live = 20, []
    for _ in range(5000):
        while waiting and rng.random() < 0.5:
            waiting -= 1
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, max_len))]
            live.append(enqueue(scheduler, prompt, rng.randrange(1, 30), draft_tokens=rng.choice([None, 0, 1, 9])))
        for state in [state for state in live if rng.random() < 0.01]:
            scheduler.finish(state)
            live.remove(state)
        for row in rank.step():
            assert row.state in live
            assert row.bad == (not row.token_ids)
            if len(row.state.tokens) == row.state.limit or row.bad or rng.random() < 0.03:
                scheduler.finish(row.state)
                live.remove(row.state)
        scheduler.check()
        if not (waiting or live or rank.in_flight):
            break
    assert_empty(scheduler)
    assert rank.plans


def test_the_latest_arrival_yields_and_is_not_let_in_again_before_the_others_fit() -> None:
    """Once its published pages cost little, it came back in the step that had preempted it, and took the pages that
    it had been preempted for: neither request went on."""
    scheduler = new_scheduler(max_num_seqs=3, max_model_len=26, page_size=1, num_pages=28, prefill_chunk_size=100, k=3)
    rank = SimulatedRank(scheduler, AcceptAll())
    old, late = enqueue(scheduler, range(8), 16), enqueue(scheduler, range(20, 30), 2)
    run(rank, [old, late], max_steps=40)
    assert old.num_preemptions == 0
    assert late.num_preemptions > 0


def test_a_row_that_needs_no_page_runs_while_an_older_one_waits_for_the_pages_of_a_preempted_one() -> None:
    for lag in range(16):
        scheduler = new_scheduler(max_num_seqs=4, num_pages=25, page_size=8, max_model_len=96, k=0, prefix_cache=False)
        rank = SimulatedRank(scheduler, AcceptAll())
        live = [enqueue(scheduler, range(n), 90 - n) for n in (9 + lag, 14, 11, 12)]
        while not scheduler.num_preemptions:
            num_plans = len(rank.plans)
            rank.step()
        planned = {slot for plan in rank.plans[num_plans:] for slot in plan.arrays.slots.tolist()}
        if live[0].slot not in planned:
            break
    assert live[0].slot >= 0
    assert planned
    assert planned < {state.slot for state in live}
    run(rank, live)


def test_a_freed_page_waits_for_the_last_step_that_refers_to_it() -> None:
    scheduler = new_scheduler(num_pages=9, k=0, prefix_cache=False)
    rank = SimulatedRank(scheduler, random.Random(0))
    first = enqueue(scheduler, range(20), 4)
    rank.step()
    rank.step()
    pages = {int(page) for page in scheduler.slots.page_table[first.slot, : scheduler.slots.num_pages[first.slot]]}
    second = enqueue(scheduler, range(20), 4)  # six of eight pages: it waits for the first one's
    scheduler.finish(first)
    assert scheduler.slots.num_fenced_pages == len(pages) == 6
    assert scheduler.slots.pool.num_available == 2
    assert rank.step() == []  # nothing can run: retires the step in flight
    assert scheduler.slots.num_fenced_pages == 0
    rank.step()
    granted = set(rank.plans[-1].arrays.pages.tolist())
    assert len(granted) == 6
    assert granted & pages
    run(rank, [second])


def test_late_results_of_a_preempted_and_of_a_finished_request_are_discarded() -> None:
    scheduler = new_scheduler(max_num_seqs=2, num_pages=17, max_model_len=60, k=1)
    rank = SimulatedRank(scheduler, AcceptAll())
    old, late = enqueue(scheduler, range(20), 40), enqueue(scheduler, range(20, 40), 30)
    while not late.num_preemptions:
        before = len(late.tokens)
        rows = rank.step()
    assert rank.plans[-2].num_rows == 2, "the step that retired had run both"
    assert [row.state for row in rows] == [old]
    assert len(late.tokens) == before
    while not rank.in_flight:
        rank.step()
    before = len(old.tokens)
    scheduler.finish(old)
    assert rank.step() == []
    assert len(old.tokens) == before
    run(rank, [late])


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_a_prompt_is_preempted_before_its_first_token(chunk: int) -> None:
    """Between two chunks, or between the last one and its result, whose token is then thrown away and drawn again: the
    request starts afresh, and is not taken for a resumed one."""
    between_chunks = before_result = 0
    for wait in range(6, 18):
        scheduler = new_scheduler(
            max_num_seqs=3, num_pages=14, page_size=2, max_model_len=24, k=1, prefill_chunk_size=chunk
        )
        rank = SimulatedRank(scheduler, AcceptAll())
        old = enqueue(scheduler, range(5), 19)
        while len(old.tokens) < wait:
            rank.step()
        late, preemptions = enqueue(scheduler, range(30, 38), 2), 0
        live = [old, late]
        while not late.num_output_tokens:
            prefilled = late.slot >= 0 and late.prefill_position == late.prefill_end
            advance(rank, live)
            if late.num_preemptions > preemptions:
                preemptions += 1
                assert not late.resumes
                assert late not in scheduler._prefilling
                before_result += prefilled
                between_chunks += not prefilled
        run(rank, live)
        assert late.num_output_tokens == 2
        assert late.num_cached_tokens == 0, "what it had computed itself was not there before it"
    assert before_result if chunk == 8 else between_chunks


def test_preempted_requests_come_back_in_the_order_of_arrival() -> None:
    scheduler = new_scheduler(max_num_seqs=4, num_pages=24, page_size=2, max_model_len=40, k=1)
    rank = SimulatedRank(scheduler, AcceptAll())
    live = [enqueue(scheduler, [i] * 4, 30) for i in range(6)]
    ended: list[int] = []
    for _ in range(500):
        for row in rank.step():
            if len(row.state.tokens) == row.state.limit:
                scheduler.finish(row.state)
                ended.append(row.state.arrival)
        arrivals = [state.arrival for state in scheduler.waiting]
        assert arrivals == sorted(arrivals)
        running = scheduler.slots.arrival.max()
        assert not arrivals or running < arrivals[0]
    assert ended == sorted(ended) == list(range(6))
    assert scheduler.num_preemptions > 2
    assert len(live) == 6


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_decode_plan_does_not_grow_with_lengths(k: int) -> None:
    sizes = set()
    for prompt_len in (1, 300):
        scheduler = new_scheduler(
            max_model_len=512, num_pages=600, page_size=16, k=k, max_num_seqs=8, prefill_chunk_size=4096
        )
        rank = SimulatedRank(scheduler, random.Random(0))
        for i in range(8):
            enqueue(scheduler, [i] * prompt_len, 200)
        for _ in range(40):
            rank.step()
        plans = [plan for plan in rank.plans[5:] if len(plan.arrays.pages) == 0]
        assert all(plan.num_verify == plan.num_rows == 8 for plan in plans)
        sizes |= {len(encode(plan)) for plan in plans}
    assert len(sizes) == 1
    assert sizes.pop() <= 200 + 8 * 6 * 4  # six int32 a row


def test_bounds_hold_the_true_length_at_every_plan() -> None:
    scheduler = new_scheduler(max_num_seqs=8, max_model_len=64, k=3, num_pages=200)
    rank = SimulatedRank(scheduler, random.Random(3))
    live = [enqueue(scheduler, range(1 + i), 50) for i in range(8)]
    tables, tight = scheduler.slots, 0
    while live:
        advance(rank, live)
        for state in live:
            if state.slot < 0:
                continue
            known = int(tables.committed[state.slot])
            low, high = known + int(tables.in_flight_min[state.slot]), known + int(tables.in_flight_max[state.slot])
            true = rank.committed[state.slot]
            assert min(low, state.limit) <= true <= high
            tight += low < true < high
    assert tight > 20


def test_a_request_that_surely_ends_gets_no_surplus_row() -> None:
    """k = 0: the last token's step is known to be the last, so that no row follows it."""
    scheduler = new_scheduler(k=0)
    rank = SimulatedRank(scheduler, random.Random(0))
    state = enqueue(scheduler, range(5), 3)
    run(rank, [state])
    assert [plan.num_rows for plan in rank.plans] == [1, 1, 1]


def test_a_cap_of_drafts_shapes_the_count_of_drafted_and_not_the_plan() -> None:
    scheduler = new_scheduler(k=3, num_pages=100)
    rank = SimulatedRank(scheduler, random.Random(0))
    caps = [0, 1, 9, None]
    live = [enqueue(scheduler, [i], 40, draft_tokens=cap) for i, cap in enumerate(caps)]
    drafted: dict[int, set[int]] = {i: set() for i in range(4)}
    for _ in range(8):
        for row in rank.step():
            if row.verified:
                drafted[row.state.arrival].add(row.drafted)
    assert drafted == {0: {0}, 1: {1}, 2: {3}, 3: {3}}
    assert all((plan.arrays.num_tokens[: plan.num_verify] == 4).all() for plan in rank.plans)
    assert len(live) == 4


def test_prompts_share_the_budget_of_a_step_and_verify_rows_come_on_top() -> None:
    scheduler = new_scheduler(max_num_seqs=8, prefill_chunk_size=10, num_pages=100, k=1)
    rank = SimulatedRank(scheduler, random.Random(0))
    for i in range(4):
        enqueue(scheduler, [i] * 7, 20)
    for _ in range(4):
        rank.step()
    prefill = [plan.arrays.num_tokens[plan.num_verify :].tolist() for plan in rank.plans]
    assert prefill == [[7, 3], [4, 6], [1, 7], []]
    assert [plan.num_verify for plan in rank.plans] == [0, 1, 2, 4]
    samples = [plan.arrays.samples[plan.num_verify :].tolist() for plan in rank.plans]
    assert samples == [[1, 0], [1, 0], [1, 1], []]
