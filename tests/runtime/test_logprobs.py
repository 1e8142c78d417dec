"""Log-probabilities are those of the target's unprocessed logits, at every output position and for every k."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from runtime.request import GenerateRequest, TokenLogprobs
from tests.fakes import ToyModel, load_toy
from tests.runtime.driving import Outcome, ask, run_all, toy_engine

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"logprobs": 5},
    {"logprobs": 0},
    {"logprobs": None},
    {"logprobs": 20, "temperature": 0.5, "seed": 1, "top_k": 3},
    {"logprobs": 1, "temperature": 2.0, "seed": 2, "logit_bias": {4: 5.0, 9: -100.0}},
    {"logprobs": 7, "temperature": 1.0, "acceptance": "ratio", "seed": 3, "repetition_penalty": 1.5},
    {"logprobs": 2, "temperature": 1.2, "acceptance": "ratio", "seed": 4, "top_p": 0.7, "draft_tokens": 1},
    {"logprobs": 3, "frequency_penalty": 1.5, "min_tokens": 6, "stop_token_ids": (1, 2, 3, 4, 5, 6, 7, 8, 9)},
)


@cache
def requests() -> tuple[GenerateRequest, ...]:
    rng = random.Random(0)
    lengths = (1, 16, 4, 33, 7, 20, 12, 5)
    return tuple(
        ask(i, [rng.randrange(50) for _ in range(length)], max_tokens=8 + 3 * i, **sampling)
        for i, (length, sampling) in enumerate(zip(lengths, SAMPLINGS, strict=True))
    )


def assert_of_raw_logits(request: GenerateRequest, outcome: Outcome) -> None:
    wanted = request.sampling.logprobs
    if wanted is None:
        assert outcome.logprobs == []
        return
    assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids
    tokens = [*request.prompt_token_ids, *outcome.token_ids]
    raw = ToyModel().plain_logits(tokens).log_softmax(-1)[len(request.prompt_token_ids) - 1 :]
    for entry, expected in zip(outcome.logprobs, raw, strict=False):
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-5)
        best = expected.topk(wanted)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("num_pages", [None, 34])
def test_every_output_position(k: int, num_pages: int | None) -> None:
    """All requests in one batch: some want none, some twenty; the pool of 33 pages preempts them."""
    engine = toy_engine(load_toy(draft=k > 0), draft_tokens=k, num_pages=num_pages)
    found = run_all(engine, requests())
    assert (engine.planner.schedulers[0].num_preemptions > 0) == (num_pages is not None)
    for request in requests():
        assert_of_raw_logits(request, found[request.request_id])


def test_a_wrong_logprob_would_be_noticed() -> None:
    outcome = run_all(toy_engine(load_toy()), [requests()[0]])["0"]
    entry = outcome.logprobs[3]
    outcome.logprobs[3] = TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob - 1e-3, top=entry.top)
    with pytest.raises(AssertionError):
        assert_of_raw_logits(requests()[0], outcome)


def test_more_logprobs_than_the_vocabulary_has_are_refused() -> None:
    engine = toy_engine(load_toy(vocab_size=8))
    with pytest.raises(ValueError, match="logprobs = 9: the vocabulary has 8 tokens"):
        engine.submit(ask(0, [1, 2], max_tokens=3, logprobs=9))
    found = run_all(engine, [ask(1, [1, 2], max_tokens=3, logprobs=8)])
    assert all(len(entry.top) == 8 for entry in found["1"].logprobs)
