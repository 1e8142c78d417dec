"""The drafts are those of a head run plainly: what a wrong cache entry or carried state would cost is acceptance."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from runtime.request import GenerateRequest
from tests.fakes import ToyHead, ToyModel, load_toy
from tests.runtime.driving import ask, run_all, toy_engine

ERROR = 1.0


@cache
def requests() -> tuple[GenerateRequest, ...]:
    rng = random.Random(9)
    trunk = [rng.randrange(50) for _ in range(20)]
    prompts = [[rng.randrange(50) for _ in range(n)] for n in (1, 4, 5, 16, 17, 30, 2, 8)]
    prompts += [trunk[:cut] + [cut] for cut in (8, 11, 12, 16, 20)]
    return tuple(ask(i, prompt, max_tokens=10 + 3 * i) for i, prompt in enumerate(prompts))


@cache
def plain_steps(k: int) -> dict[str, tuple[list[int], list[int]]]:
    """Ids and number of tokens of each step, from the schedule of design section 3 without caches or batches."""
    model = ToyModel()
    return {r.request_id: _decode(model, ToyHead(model, error=ERROR), r, k) for r in requests()}


def _decode(model: ToyModel, head: ToyHead, request: GenerateRequest, k: int) -> tuple[list[int], list[int]]:
    tokens = list(request.prompt_token_ids)
    assert request.sampling.max_tokens is not None
    limit = len(tokens) + request.sampling.max_tokens
    tokens.append(int(model.plain_logits(tokens)[-1].argmax()))
    sizes = [1]
    while len(tokens) < limit:
        drafts = _drafts(model, head, tokens, k)[: limit - len(tokens) - 1]
        judged = model.plain_logits(tokens + drafts)[len(tokens) - 1 :].argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == judged[accepted]:
            accepted += 1
        tokens += judged[: accepted + 1]
        sizes.append(accepted + 1)
    return tokens[len(request.prompt_token_ids) :], sizes


def _drafts(model: ToyModel, head: ToyHead, tokens: list[int], k: int) -> list[int]:
    """Entries 0..n-2 of the head come from the target's states, those of drafts from its own."""
    hidden = model.plain_hidden(tokens)[:-1]
    following, drafts = tokens[1:], []
    for _ in range(k):
        states = head.plain_states(following, hidden)
        drafts.append(int(head.logits(states[-1:]).argmax()))
        hidden = torch.cat((hidden, states[-1:]))
        following = [*following, drafts[-1]]
    return drafts


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefill_chunk_size": 3, "prefix_cache": False},
        {"num_pages": 30},
        {"num_pages": 30, "schedule": "settled", "prefill_chunk_size": 5},
        {"max_num_seqs": 2, "page_size": 16},
    ],
)
def test_every_step_accepts_what_the_plain_head_would_have(k: int, settings: dict[str, Any]) -> None:
    engine = toy_engine(load_toy(error=ERROR), draft_tokens=k, **settings)
    found = run_all(engine, requests(), arrivals={r.request_id: i for i, r in enumerate(requests())})
    assert {i: (o.token_ids, o.chunk_sizes) for i, o in found.items()} == plain_steps(k)
    assert (engine.planner.schedulers[0].num_preemptions > 0) == ("num_pages" in settings)


def test_the_plain_head_is_neither_useless_nor_perfect() -> None:
    sizes = [size for _, steps in plain_steps(3).values() for size in steps[1:]]
    assert {1, 2, 3, 4} == set(sizes)
    assert 0.2 < sum(size - 1 for size in sizes) / (3 * len(sizes)) < 0.8
