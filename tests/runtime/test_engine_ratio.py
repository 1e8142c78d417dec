"""Ratio requests: the same ids alone, in any batch and after a preemption, for the same k. And what steps count."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from runtime.request import GenerateRequest
from tests.fakes import load_toy
from tests.runtime.driving import Outcome, ask, run_all, toy_engine

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 6},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.0, "frequency_penalty": 0.8, "draft_tokens": 1},
)


@cache
def requests() -> tuple[GenerateRequest, ...]:
    rng = random.Random(5)
    lengths = (1, 4, 17, 30, 8, 16, 3, 12)
    return tuple(
        ask(i, [rng.randrange(50) for _ in range(n)], acceptance="ratio", seed=i, max_tokens=30, **SAMPLINGS[i % 4])
        for i, n in enumerate(lengths)
    )


@cache
def alone(k: int) -> dict[str, list[int]]:
    engine = toy_engine(load_toy(draft=k > 0), draft_tokens=k, max_num_seqs=1, prefix_cache=False, schedule="settled")
    return ids(run_all(engine, requests()))


def ids(found: dict[str, Outcome]) -> dict[str, list[int]]:
    return {i: outcome.token_ids for i, outcome in found.items()}


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "settings", [{"prefill_chunk_size": 3}, {"num_pages": 33}, {"num_pages": 40, "schedule": "settled"}]
)
def test_the_same_ids_in_any_company(k: int, settings: dict[str, Any]) -> None:
    """Greedy and seeded neighbours come and go; the small pool preempts."""
    others = [
        ask(f"other {i}", [i] * (3 + i), max_tokens=25, temperature=i % 2, seed=i, min_p=0.05 * i) for i in range(5)
    ]
    engine = toy_engine(load_toy(draft=k > 0), draft_tokens=k, **settings)
    arrivals = {r.request_id: i for i, r in enumerate([*requests(), *others])}
    found = ids(run_all(engine, [*requests(), *others], arrivals=arrivals))
    assert {i: found[i] for i in alone(k)} == alone(k)
    assert (engine.planner.schedulers[0].num_preemptions > 0) == ("num_pages" in settings)


def test_ids_depend_on_k_and_on_the_seed() -> None:
    assert alone(1) != alone(2) != alone(0)
    again = ask(0, requests()[0].prompt_token_ids, acceptance="ratio", seed=77, max_tokens=30, temperature=1.0)
    assert run_all(toy_engine(load_toy()), [again])["0"].token_ids != alone(1)["0"]


def test_without_a_seed_two_requests_differ() -> None:
    twins = [ask(i, [1, 2, 3], temperature=1.5, max_tokens=40) for i in range(2)]
    first, second = ids(run_all(toy_engine(load_toy()), twins)).values()
    assert first != second


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("num_pages", [None, 33])
def test_counters_add_up(k: int, num_pages: int | None) -> None:
    """No stop cuts these outputs: each verify step gave one token and its accepted drafts."""
    greedy = [ask(f"greedy {i}", [i, i + 1, 9], max_tokens=30) for i in range(3)]
    engine = toy_engine(load_toy(draft=k > 0), draft_tokens=k, num_pages=num_pages)
    found = run_all(engine, [*requests(), *greedy])
    for outcome in found.values():
        counters = outcome.counters
        assert counters.num_output_tokens == len(outcome.token_ids) == 30
        assert 1 + counters.steps + counters.accepted == 30
        assert len(outcome.chunk_sizes) == 1 + counters.steps
        assert outcome.chunk_sizes[0] == 1
        assert counters.accepted == sum(size - 1 for size in outcome.chunk_sizes)
        per_position = counters.accepted_per_position
        assert len(per_position) == k
        assert sum(per_position) == counters.accepted
        assert list(per_position) == sorted(per_position, reverse=True)
        assert per_position == tuple(sum(size > i + 1 for size in outcome.chunk_sizes[1:]) for i in range(k))
        assert counters.accepted <= counters.drafted <= k * counters.steps
        assert counters.ttft_s is not None
        assert counters.e2e_s is not None
        assert 0 < counters.ttft_s <= counters.e2e_s
    preempted = sum(outcome.counters.num_preemptions for outcome in found.values())
    assert preempted == engine.planner.schedulers[0].num_preemptions
    assert (preempted > 0) == (num_pages is not None)


@pytest.mark.parametrize(("cap", "max_tokens"), [(None, 20), (0, 20), (1, 20), (2, 20), (9, 20), (None, 2), (None, 3)])
def test_drafted_counts_what_could_have_been_accepted(cap: int | None, max_tokens: int) -> None:
    """Not the drafts beyond a request's own cap, nor those beyond its last token."""
    outcome = run_all(
        toy_engine(load_toy(error=0.0), draft_tokens=3), [ask(0, [1, 2, 3], max_tokens=max_tokens, draft_tokens=cap)]
    )["0"]
    drafted, length = 0, 1
    for size in outcome.chunk_sizes[1:]:
        drafted += min(3, 3 if cap is None else cap, max_tokens - length - 1)
        length += size
    assert length == max_tokens
    assert outcome.counters.drafted == drafted
    assert outcome.counters.accepted > 0.5 * drafted or max_tokens < 20 or cap == 0
