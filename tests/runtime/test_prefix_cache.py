"""What the prefix cache offers is final and right for target and head, is never rewritten, and is found again."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from runtime.engine import Engine
from runtime.kv_pages import chain_hash
from runtime.request import GenerateRequest
from tests.fakes import ToyDrafter, ToyModel, load_toy
from tests.runtime.driving import Outcome, ask, plain_decode, run_all, toy_engine

SIZE = 4
KV = list[torch.Tensor]


def family(count: int, seed: int = 0) -> list[GenerateRequest]:
    """Prompts that begin alike for 0..5 pages and part inside a page, at its end, or one token later."""
    rng = random.Random(seed)
    trunk = [rng.randrange(50) for _ in range(24)]
    requests = []
    for i in range(count):
        own = [rng.randrange(50) for _ in range(rng.randrange(1, 14))]
        prompt = trunk[: rng.choice((0, 3, 4, 5, 8, 12, 16, 19, 20, 24))] + own
        requests.append(ask(i, prompt, max_tokens=rng.randrange(1, 20)))
    return requests


def caches(engine: Engine) -> KV:
    return engine._channel._executor._kv


def hashes_of(tokens: list[int], lookahead: int) -> list[bytes]:
    """Chained page hashes of a sequence, by the rule of the design."""
    found, previous, array = [], b"", np.array(tokens, np.int32)
    for begin in range(0, len(tokens) - SIZE - lookahead + 1, SIZE):
        previous = chain_hash(previous, array[begin : begin + SIZE + lookahead])
        found.append(previous)
    return found


def wrong_pages(engine: Engine, requests: list[GenerateRequest], found: dict[str, Outcome]) -> tuple[int, int]:
    """How many published pages differ from a plain computation over their tokens, and how many were compared."""
    model, pool, kv = ToyModel(), engine.planner.schedulers[0].slots.pool, caches(engine)
    lookahead = engine.planner.schedulers[0].limits.lookahead
    wrong, seen = 0, set()
    for request in requests:
        tokens = [*request.prompt_token_ids, *found[request.request_id].token_ids]
        hidden = model.plain_hidden(tokens)
        target = model.embedding[torch.tensor(tokens)]
        head = target[1:] + 0.05 * hidden[:-1]  # the head's entry depends on the next token
        for i, page_hash in enumerate(hashes_of(tokens, lookahead)):
            for page in pool.match([page_hash]):
                seen.add(page)
                part = slice(i * SIZE, (i + 1) * SIZE)
                equal = torch.equal(kv[0][page], target[part])
                wrong += not (equal and (lookahead == 0 or torch.allclose(kv[1][page], head[part], atol=1e-6)))
    return wrong, len(seen)


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["ahead", "settled"])
@pytest.mark.parametrize("num_pages", [None, 24])
def test_published_pages_are_right_for_target_and_head(k: int, schedule: str, num_pages: int | None) -> None:
    requests = family(24)
    engine = toy_engine(load_toy(), draft_tokens=k, schedule=schedule, num_pages=num_pages)
    found = run_all(engine, requests, arrivals={r.request_id: i for i, r in enumerate(requests)})
    wrong, compared = wrong_pages(engine, requests, found)
    assert wrong == 0
    assert compared == engine.planner.schedulers[0].slots.pool.num_published > 15
    assert engine.planner.schedulers[0].num_prefix_hits > 0
    assert (engine.planner.schedulers[0].num_preemptions > 0) == (num_pages is not None)


class ShortSighted(ToyDrafter):
    """Claims that its cache entries depend on no later token."""

    lookahead = 0


def test_without_the_lookahead_in_the_hash_pages_of_the_head_would_be_wrong() -> None:
    requests = family(24)
    engine = toy_engine(load_toy(make_drafter=ShortSighted))
    found = run_all(engine, requests)
    assert {i: o.token_ids for i, o in found.items()} == {
        r.request_id: plain_decode(ToyModel(), r)[0] for r in requests
    }, "a wrong page of the head costs acceptance, never exactness"
    engine.planner.schedulers[0].limits.__dict__["lookahead"] = 1  # judge the head's entries, too
    model, kv = ToyModel(), caches(engine)
    wrong = 0
    for request in requests:
        tokens = [*request.prompt_token_ids, *found[request.request_id].token_ids]
        head = model.embedding[torch.tensor(tokens[1:])] + 0.05 * model.plain_hidden(tokens)[:-1]
        for i, page_hash in enumerate(hashes_of(tokens, 0)):
            part = slice(i * SIZE, (i + 1) * SIZE)
            for page in engine.planner.schedulers[0].slots.pool.match([page_hash]):
                wrong += len(head[part]) == SIZE and not torch.allclose(kv[1][page], head[part], atol=1e-6)
    assert wrong > 0


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("total", [4, 5, 6, 15, 16, 17, 18])
def test_pages_are_published_up_to_the_last_but_one_position(k: int, total: int) -> None:
    """Of n committed tokens, positions 0..n-2 are final."""
    for prompt_len in {1, 4, total - 1} - {total}:
        engine = toy_engine(load_toy(), draft_tokens=k)
        prompt = [i % 50 for i in range(min(prompt_len, total - 1))]
        run_all(engine, [ask(0, prompt, max_tokens=total - len(prompt))])
        assert engine.planner.schedulers[0].slots.pool.num_published == (total - 1) // SIZE


@pytest.mark.parametrize(("drafts", "cached"), [(True, 4), (False, 8)])
def test_the_token_after_a_page_is_part_of_its_hash_when_a_head_drafts(drafts: bool, cached: int) -> None:
    first, second = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8, 33, 10]
    engine = toy_engine(load_toy(draft=drafts), draft_tokens=int(drafts))
    requests = [ask(0, first, max_tokens=4), ask(1, second, max_tokens=4)]
    found = run_all(engine, requests, arrivals={"1": 20})
    assert found["0"].counters.num_cached_tokens == 0
    assert found["1"].counters.num_cached_tokens == cached
    for request in requests:
        assert found[request.request_id].token_ids == plain_decode(ToyModel(), request)[0]


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (15, 12), (16, 12), (17, 16), (1, 0)])
def test_a_full_match_recomputes_its_last_page(length: int, cached: int) -> None:
    """At least one position is always computed: its logits give the first token, its state the first draft."""
    prompt = [i % 7 for i in range(length)]
    requests = [ask(0, prompt, max_tokens=6), ask(1, prompt, max_tokens=6), ask(2, prompt, max_tokens=6)]
    found = run_all(toy_engine(load_toy()), requests, arrivals={"1": 20, "2": 20})
    assert [found[str(i)].counters.num_cached_tokens for i in range(3)] == [0, cached, cached]
    assert found["0"].token_ids == found["1"].token_ids == found["2"].token_ids
    first, again = found["0"].counters, found["1"].counters
    assert (first.steps, first.accepted) == (again.steps, again.accepted), "the cached head drafts alike"


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (16, 12), (17, 16)])
def test_a_full_match_without_a_head_recomputes_its_last_page_too(length: int, cached: int) -> None:
    prompt = [i % 7 for i in range(length)]
    requests = [ask(0, prompt, max_tokens=6), ask(1, prompt, max_tokens=6)]
    found = run_all(toy_engine(load_toy(draft=False), draft_tokens=0), requests, arrivals={"1": 20})
    assert found["1"].counters.num_cached_tokens == cached
    assert found["0"].token_ids == found["1"].token_ids


@pytest.mark.parametrize("k", [0, 1, 3])
def test_shared_pages_are_never_rewritten(k: int) -> None:
    """The bytes of every published page stay as they were, for as long as it is published."""
    requests = family(30, seed=1)
    engine = toy_engine(load_toy(), draft_tokens=k, schedule="settled", num_pages=40)
    pool, kv = engine.planner.schedulers[0].slots.pool, caches(engine)
    known: dict[tuple[int, bytes], tuple[bytes, ...]] = {}
    compared, todo = 0, list(requests)
    while todo or engine.has_work():
        if todo:
            engine.submit(todo.pop())
        engine.step()
        published = pool._hash_of_page.items()
        now = {(page, h): tuple(layer[page].numpy().tobytes() for layer in kv) for page, h in published}
        for key in now.keys() & known.keys():
            assert now[key] == known[key]
            compared += pool._ref_count[key[0]] > 1
        known = now
    assert compared > 50, "pages that several requests read"
    engine.close()


def test_resumed_requests_find_their_own_pages() -> None:
    """The prompts have nothing in common: every hit is a preempted request's own page."""
    requests = [ask(i, [i] * 6, max_tokens=40) for i in range(4)]
    engine = toy_engine(load_toy(), num_pages=24)
    found = run_all(engine, requests)
    assert engine.planner.schedulers[0].num_preemptions > 0
    assert engine.planner.schedulers[0].num_prefix_hits > 0
    for request in requests:
        outcome = found[request.request_id]
        assert outcome.token_ids == plain_decode(ToyModel(), request)[0]
        assert outcome.counters.num_cached_tokens == 0, "what it had computed itself is not a cached prompt"


def test_the_oldest_pages_make_room_for_new_ones() -> None:
    engine = toy_engine(load_toy(), num_pages=13, max_num_seqs=1)
    prompts = [[i, 40, 41, i, 42, 43, i, 44, 45] for i in range(8)]
    requests = [ask(i, prompt, max_tokens=3) for i, prompt in enumerate(prompts)]
    again = [ask(f"{i} again", prompts[i], max_tokens=3) for i in (7, 6, 0)]
    found = run_all(engine, [*requests, *again])
    assert [found[f"{i} again"].counters.num_cached_tokens for i in (7, 6, 0)] == [8, 8, 0]


def test_off_means_off() -> None:
    engine = toy_engine(load_toy(), prefix_cache=False)
    found = run_all(engine, [ask(i, [1] * 20, max_tokens=5) for i in range(3)], arrivals={"2": 20})
    assert all(o.counters.num_cached_tokens == 0 for o in found.values())
    assert engine.planner.schedulers[0].slots.pool.num_published == engine.planner.schedulers[0].num_prefix_hits == 0


def test_a_reset_forgets_pages_in_use_and_out_of_use() -> None:
    engine = toy_engine(load_toy())
    found = {str(i): Outcome() for i in range(3)}
    engine.submit(ask(0, [1] * 20, max_tokens=5))
    engine.submit(ask(1, [2] * 20, max_tokens=30))
    for _ in range(12):
        for chunk in engine.step():
            found[chunk.request_id].add(chunk)
    engine.planner.schedulers[0].slots.pool.reset_prefix_cache()
    engine.planner.schedulers[0].check()
    again = ask(2, [1] * 20, max_tokens=5)
    engine.submit(again)
    while engine.has_work():
        for chunk in engine.step():
            found[chunk.request_id].add(chunk)
    assert found["2"].counters.num_cached_tokens == 0
    assert found["2"].token_ids == found["0"].token_ids == plain_decode(ToyModel(), again)[0]
    assert engine.pages_and_slots_in_use() == (0, 0)
    engine.close()
