"""Two thousand random requests: afterwards nothing is in use, and every output is that of an undisturbed run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.request import FinishReason, GenerateRequest
from tests.fakes import ToyModel, load_toy
from tests.runtime.driving import Outcome, ask, plain_decode, run_all, toy_engine

EOS = (7, 19)
MAX_LEN = 64


def random_request(rng: random.Random, name: str) -> GenerateRequest:
    """Prompts share beginnings; half the requests sample, a tenth by the ratio form."""
    trunk = random.Random(rng.randrange(3))
    prompt = [trunk.randrange(50) for _ in range(rng.randrange(24))] + [
        rng.randrange(50) for _ in range(rng.randrange(1, 12))
    ]
    max_tokens, draft_tokens = rng.choice((1, 3, 12, 30, None)), rng.choice((None, None, 1))
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "draft_tokens": draft_tokens}
    if rng.random() < 0.5:
        sampling |= {"temperature": rng.choice((0.7, 1.2)), "seed": rng.randrange(2**40), "top_k": rng.choice((0, 8))}
        sampling |= {"acceptance": "ratio"} if rng.random() < 0.2 else {}
    if rng.random() < 0.2:
        sampling |= {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
    if rng.random() < 0.3:
        sampling |= {"stop_token_ids": (rng.randrange(50), rng.randrange(50)), "min_tokens": rng.randrange(2)}
    return ask(name, prompt, **sampling)


def storm(engine: Engine, requests: list[GenerateRequest], rng: random.Random) -> tuple[dict[str, Outcome], int]:
    """Submit at random, abort at random; returns outcomes and how many aborts hit a waiting request."""
    todo, found, aborted_waiting = list(requests), {}, 0
    while todo or engine.has_work():
        while todo and rng.random() < 0.7 and len(engine.planner.schedulers[0].waiting) < 12:
            request = todo.pop()
            found[request.request_id] = Outcome()
            engine.submit(request)
        if rng.random() < 0.3 and engine._live:
            victim = rng.choice(list(engine._live))
            aborted_waiting += engine._live[victim].state.slot < 0
            engine.abort(victim)
        for chunk in engine.step():
            found[chunk.request_id].add(chunk)
    return found, aborted_waiting


@pytest.mark.parametrize(
    ("schedule", "k", "num_requests"), [("ahead", 3, 700), ("settled", 2, 900), ("ahead", 0, 400)]
)
def test_random_traffic_leaves_nothing_behind(schedule: str, k: int, num_requests: int) -> None:
    rng = random.Random(k)
    requests = [random_request(rng, str(i)) for i in range(num_requests)]
    sizes: dict[str, Any] = dict(max_model_len=MAX_LEN, draft_tokens=k)
    engine = toy_engine(
        load_toy(draft=k > 0, eos=EOS, error=0.3), max_num_seqs=24, num_pages=26, schedule=schedule, **sizes
    )
    found, aborted_waiting = storm(engine, requests, rng)
    scheduler = engine.planner.schedulers[0]
    scheduler.check()
    assert engine.pages_and_slots_in_use() == (0, 0)
    assert not engine._live
    assert not scheduler.waiting
    assert not scheduler.has_work
    assert scheduler.slots.num_fenced_pages == 0
    list(engine.submit(ask("last", [1, 2], max_tokens=4)))  # its plan tells the rank of the slots freed last
    assert engine._channel._executor._state.penalties.num_slots_in_use == 0
    engine.close()

    ratio = [r for r in requests if r.sampling.acceptance == "ratio"]
    one_by_one = toy_engine(load_toy(draft=k > 0, eos=EOS, error=0.3), max_num_seqs=1, prefix_cache=False, **sizes)
    alone = run_all(one_by_one, ratio)
    model, cut_inside = ToyModel(), 0
    for request in requests:
        outcome = found[request.request_id]
        if request.request_id in alone:
            undisturbed = alone[request.request_id]
            expected = undisturbed.token_ids, undisturbed.finish_reason
        else:
            expected = plain_decode(model, request, eos=EOS, max_model_len=MAX_LEN)
        if outcome.finish_reason is FinishReason.ABORT:
            assert outcome.token_ids == expected[0][: len(outcome.token_ids)]
        else:
            assert (outcome.token_ids, outcome.finish_reason) == expected
            counters = outcome.counters
            cut_inside += 1 + counters.steps + counters.accepted > counters.num_output_tokens

    reasons = [outcome.finish_reason for outcome in found.values()]
    for reason in (FinishReason.ABORT, FinishReason.STOP, FinishReason.LENGTH):
        assert reasons.count(reason) > num_requests / 20
    assert aborted_waiting > 5
    assert scheduler.num_preemptions > num_requests / 60
    assert scheduler.num_prefix_hits > 2 * num_requests
    assert cut_inside > num_requests / 50 or k == 0
