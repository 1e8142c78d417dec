"""The ids of the engine are those of plain decoding, whatever k, batch, chunks, pages, schedule and arrivals."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from runtime.request import FinishReason, GenerateRequest
from tests.fakes import load_toy
from tests.runtime.driving import Outcome, ask, plain_decode, run_all, toy_engine

EOS = (7,)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.9, "frequency_penalty": 0.6},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": -(2**63), "top_k": 5},
    {"temperature": 1.3, "seed": 2**63 - 1, "top_p": 0.8, "choice": 3},
    {"temperature": 0.9, "seed": 4, "min_p": 0.1, "frequency_penalty": 0.5},
    {"temperature": 1.5, "seed": 5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 6, "logit_bias": {3: 2.0, 11: -100.0}, "min_tokens": 9},
    {"logit_bias": {7: 4.0}, "min_tokens": 4},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": (1, 2), "draft_tokens": 1},
    {"ignore_eos": True, "draft_tokens": 0},
)
SHARED = tuple(random.Random(1).randrange(50) for _ in range(16))


@cache
def workload() -> tuple[GenerateRequest, ...]:
    """Prompts of 1 token, of whole pages and chunks, one more and one less; half of them begin alike."""
    rng = random.Random(2)
    lengths = (1, 2, 4, 5, 15, 16, 17, 31, 32, 33, 40, 50, 1, 3, 8, 20, 21, 24, 36, 16, 12, 7, 28, 48)
    requests = []
    for i, length in enumerate(lengths):
        own = [rng.randrange(50) for _ in range(length)]
        prompt = [*SHARED, *own][:length] if i % 2 else own
        sampling = SAMPLINGS[i % len(SAMPLINGS)]
        requests.append(ask(i, prompt, max_tokens=max(rng.randrange(1, 30), sampling.get("min_tokens", 0)), **sampling))
    return tuple(requests)


@cache
def expected() -> dict[str, tuple[list[int], FinishReason]]:
    model = load_toy().model
    return {r.request_id: plain_decode(model, r, eos=EOS) for r in workload()}


def outcomes(k: int, arrivals: dict[str, int] | None = None, **settings: Any) -> tuple[dict[str, Outcome], int, int]:
    """Outcomes, number of preemptions, positions found in the prefix cache."""
    engine = toy_engine(load_toy(draft=k > 0, eos=EOS), draft_tokens=k, **settings)
    found = run_all(engine, workload(), arrivals=arrivals)
    return found, engine.planner.schedulers[0].num_preemptions, engine.planner.schedulers[0].num_prefix_hits


def assert_plain(found: dict[str, Outcome]) -> None:
    assert {i: (o.token_ids, o.finish_reason) for i, o in found.items()} == expected()


def test_the_workload_covers_what_it_should() -> None:
    reasons = [reason for _, reason in expected().values()]
    assert reasons.count(FinishReason.STOP) >= 3
    assert reasons.count(FinishReason.LENGTH) >= 3
    assert len({tuple(ids[:3]) for ids, _ in expected().values()}) > len(reasons) / 2


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5])
def test_draft_tokens(k: int) -> None:
    found, _, _ = outcomes(k)
    assert_plain(found)
    drafted, accepted = (sum(getattr(o.counters, name) for o in found.values()) for name in ("drafted", "accepted"))
    assert 0.2 * drafted < accepted < drafted if k else drafted == accepted == 0


@pytest.mark.parametrize(("k", "chunk"), [(1, 1), (0, 3), (3, 3), (2, 512)])
def test_chunk_sizes(k: int, chunk: int) -> None:
    assert_plain(outcomes(k, prefill_chunk_size=chunk)[0])


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_pool_too_small_for_the_batch(k: int, prefix_cache: bool) -> None:
    found, preemptions, hits = outcomes(k, num_pages=22, prefix_cache=prefix_cache)
    assert_plain(found)
    assert preemptions > 3
    assert (hits > 0) == prefix_cache


@pytest.mark.parametrize(("k", "page_size"), [(3, 1), (1, 2), (3, 16)])
def test_page_sizes(k: int, page_size: int) -> None:
    found, preemptions, _ = outcomes(k, page_size=page_size, num_pages=1 + -(-96 // page_size))
    assert_plain(found)
    assert preemptions > 0


@pytest.mark.parametrize("batch", [1, 2, 24])
def test_batch_sizes(batch: int) -> None:
    assert_plain(outcomes(2, max_num_seqs=batch)[0])


@pytest.mark.parametrize(("k", "debug", "num_pages"), [(0, True, 22), (1, False, 22), (2, True, None), (3, True, 22)])
def test_settled_plans(k: int, debug: bool, num_pages: int | None) -> None:
    assert_plain(outcomes(k, schedule="settled", debug=debug, num_pages=num_pages)[0])


@pytest.mark.parametrize(("k", "num_pages"), [(0, None), (1, 22), (3, 22)])
def test_without_debug_checks(k: int, num_pages: int | None) -> None:
    assert_plain(outcomes(k, debug=False, num_pages=num_pages)[0])


@pytest.mark.parametrize(("k", "gap"), [(0, 3), (1, 1), (3, 3)])
def test_requests_that_arrive_while_others_run(k: int, gap: int) -> None:
    arrivals = {r.request_id: i * gap for i, r in enumerate(workload())}
    found, _, hits = outcomes(k, arrivals, num_pages=40)
    assert_plain(found)
    assert hits > 0


def _combinations() -> list[dict[str, Any]]:
    axes: dict[str, tuple[Any, ...]] = dict(
        k=(0, 1, 2, 3), prefill_chunk_size=(2, 5, 16, 512), num_pages=(22, 30, None), prefix_cache=(True, False),
        max_num_seqs=(1, 3, 8, 24), schedule=("ahead", "settled"), debug=(True, False), gap=(0, 1, 5),
    )
    rng = random.Random(4)
    return [{name: rng.choice(values) for name, values in axes.items()} for _ in range(8)]


@pytest.mark.parametrize("settings", _combinations(), ids=lambda s: "-".join(str(v) for v in s.values()))
def test_combinations(settings: dict[str, Any]) -> None:
    settings = dict(settings)
    gap = settings.pop("gap")
    arrivals = {r.request_id: i * gap for i, r in enumerate(workload())}
    assert_plain(outcomes(settings.pop("k"), arrivals, **settings)[0])
