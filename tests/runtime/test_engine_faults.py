"""What goes wrong in one request stays in it: NaN, aborts, late results, bad requests. A failing rank is reported."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp.drafter import Drafts
from runtime.attention.meta import AttentionMeta
from runtime.channel import RankFailure
from runtime.engine import Engine
from runtime.plan import StepResult
from runtime.request import FinishReason, GenerateRequest, SamplingParams
from tests.fakes import ToyDrafter, ToyModel, load_toy
from tests.runtime.driving import Outcome, ask, plain_decode, run_all, toy_engine

NAN = 49


def clean_requests(count: int, seed: int = 0) -> list[GenerateRequest]:
    """Requests that never meet the token whose embedding is NaN."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(NAN) for _ in range(rng.randrange(1, 40))] for _ in range(count)]
    return [ask(i, prompt, max_tokens=20, logit_bias={NAN: -100.0}) for i, prompt in enumerate(prompts)]


def expected(requests: list[GenerateRequest], nan_token: int | None = NAN) -> dict[str, list[int]]:
    model = ToyModel(nan_token=nan_token)
    return {r.request_id: plain_decode(model, r)[0] for r in requests}


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize("place", [0, 9, 19])
def test_a_nan_in_a_prompt_ends_that_request_alone(k: int, chunk: int, place: int) -> None:
    requests = clean_requests(6)
    prompt = [1, 2, 3, 4, 5] * 4
    prompt[place] = NAN
    faulty = [ask("nan", prompt, max_tokens=20), ask("nan sampled", prompt, max_tokens=20, seed=1, temperature=1.0)]
    engine = toy_engine(load_toy(draft=k > 0, nan_token=NAN), draft_tokens=k, prefill_chunk_size=chunk)
    found = run_all(engine, [*requests[:3], *faulty, *requests[3:]])
    for request in faulty:
        outcome = found.pop(request.request_id)
        assert outcome.finish_reason is FinishReason.ERROR
        assert outcome.token_ids == []
        assert "not finite" in (outcome.error or "")
    assert {i: o.token_ids for i, o in found.items()} == expected(requests)
    assert all(o.finish_reason is FinishReason.LENGTH for o in found.values())


@pytest.mark.parametrize("chunk", [4, 512])
def test_a_nan_publishes_no_page_from_its_chunk_on(chunk: int) -> None:
    engine = toy_engine(load_toy(nan_token=NAN), prefill_chunk_size=chunk)
    clean, dirty = [1, 2, 3, 4], [NAN, 6, 7, 8]
    run_all(engine, [ask("nan", [*clean, *dirty, *clean, *dirty, 9], max_tokens=5)])
    # the page in front of the NaN, if its chunk ended there
    assert engine.planner.schedulers[0].slots.pool.num_published <= 1


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "acceptance": "ratio"}])
def test_a_nan_that_a_request_generates(k: int, sampling: dict[str, Any]) -> None:
    """The step that reads the token fails, with all that it would have added. A rejected draft harms nobody."""
    requests = clean_requests(6, 1)
    faulty = ask("nan", [1, 2, 3], max_tokens=60, logit_bias={NAN: 4.0}, **sampling)
    engine = toy_engine(load_toy(draft=k > 0, nan_token=NAN, error=2.0), draft_tokens=k)
    found = run_all(engine, [*requests, faulty])
    outcome = found.pop("nan")
    assert outcome.finish_reason is FinishReason.ERROR
    assert NAN not in outcome.token_ids[:-1]
    if k == 0:
        assert outcome.token_ids[-1] == NAN
    if sampling.get("acceptance") != "ratio":
        plain = plain_decode(ToyModel(nan_token=NAN), faulty)[0]
        assert plain[: len(outcome.token_ids)] == outcome.token_ids
        assert NAN in plain[: len(outcome.token_ids) + 1 + k]
    assert {i: o.token_ids for i, o in found.items()} == expected(requests)


class InsistentDrafter(ToyDrafter):
    """Proposes the token that yields NaN, every time."""

    def propose(self, *args: Any, **kwargs: Any) -> Drafts:
        drafts = super().propose(*args, **kwargs)
        return replace(drafts, token_ids=torch.full_like(drafts.token_ids, NAN))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "acceptance": "ratio"}])
def test_rejected_drafts_that_yield_nan_fail_nobody(k: int, sampling: dict[str, Any]) -> None:
    requests = [replace(r, sampling=SamplingParams(max_tokens=20, **sampling)) for r in clean_requests(6, 2)]
    loaded = load_toy(nan_token=NAN, make_drafter=InsistentDrafter)
    model = loaded.model
    assert isinstance(model, ToyModel)
    model.bias[NAN] = -100.0  # the target never takes it
    found = run_all(toy_engine(loaded, draft_tokens=k), requests)
    assert all(o.finish_reason is FinishReason.LENGTH and len(o.token_ids) == 20 for o in found.values())
    assert all(o.counters.accepted == 0 < o.counters.drafted for o in found.values())
    if sampling.get("acceptance") != "ratio":
        assert {i: o.token_ids for i, o in found.items()} == {r.request_id: plain_decode(model, r)[0] for r in requests}


@pytest.mark.parametrize("schedule", ["ahead", "settled"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 9])
def test_an_abort_ends_one_request_wherever_it_is(schedule: str, steps: int) -> None:
    """Two slots: of four requests some wait, one is in the middle of its prompt, some decode."""
    requests = [ask(i, p, max_tokens=12) for i, p in enumerate(([1] * 3, [2] * 40, [3] * 5, [4] * 2))]
    plain = expected(requests, None)
    for victim in requests:
        engine = toy_engine(load_toy(), max_num_seqs=2, schedule=schedule, prefill_chunk_size=8)
        found = {r.request_id: Outcome() for r in requests}
        for request in requests:
            engine.submit(request)
        for _ in range(steps):
            _collect(found, engine)
        engine.abort(victim.request_id)
        engine.abort(victim.request_id)  # a second time: nothing
        _drain(found, engine)
        gone = found.pop(victim.request_id)
        kept = plain[victim.request_id]
        assert gone.token_ids == kept[: len(gone.token_ids)]
        assert gone.finish_reason is (FinishReason.LENGTH if len(gone.token_ids) == 12 else FinishReason.ABORT)
        assert {i: o.token_ids for i, o in found.items()} == {i: plain[i] for i in found}


def test_an_aborted_id_can_be_used_again_while_its_last_step_is_in_flight() -> None:
    engine = toy_engine(load_toy(), draft_tokens=2)
    found = {"a": Outcome()}
    engine.submit(ask("a", [1, 2, 3], max_tokens=30))
    for _ in range(4):
        _collect(found, engine)
    engine.abort("a")
    _collect(found, engine)
    assert found["a"].finish_reason is FinishReason.ABORT
    found["a"] = Outcome()
    again = ask("a", [9, 8], max_tokens=10)
    engine.submit(again)
    _drain(found, engine)
    assert found["a"].token_ids == expected([again], None)["a"]


def test_an_abort_after_a_preemption_while_it_waits() -> None:
    requests = [ask(i, [i, 5, 9, i], max_tokens=40) for i in range(4)]
    plain = expected(requests, None)
    engine = toy_engine(load_toy(), num_pages=24)
    found = {r.request_id: Outcome() for r in requests}
    for request in requests:
        engine.submit(request)
    while not engine.planner.schedulers[0].num_preemptions:
        _collect(found, engine)
    waiting = engine.planner.schedulers[0].waiting[0].request.request_id
    assert found[waiting].token_ids
    engine.abort(waiting)
    _drain(found, engine)
    gone = found.pop(waiting)
    assert gone.finish_reason is FinishReason.ABORT
    assert gone.counters.num_preemptions == 1
    assert gone.token_ids == plain[waiting][: len(gone.token_ids)]
    assert {i: o.token_ids for i, o in found.items()} == {i: plain[i] for i in found}


def test_what_can_never_run_is_refused_and_changes_nothing() -> None:
    engine = toy_engine(load_toy(vocab_size=50), num_pages=21, max_model_len=100)
    engine.submit(ask("taken", [1, 2], max_tokens=4))
    before = _books(engine)
    bad: list[tuple[GenerateRequest, str]] = [
        (ask("taken", [1]), "'taken' is already running"),
        (ask("a", []), "empty prompt"),
        (ask("a", [1] * 100), "prompt of 100 tokens: expected at most 99"),
        (ask("a", [1, 50]), "token id 50: expected an integer in 0..49"),
        (ask("a", [-1]), "token id -1"),
        (ask("a", [1.5]), "token id 1.5: expected an integer"),
        (ask("a", [1] * 60, max_tokens=30), "needs 23 KV pages, the pool has 20"),
        (ask("a", [1], max_tokens=None), "needs 25 KV pages"),
        (ask("a", [1], max_tokens=9, stop=("x",)), "stop strings need a tokenizer.json"),
        (ask("a", [1], max_tokens=9, logit_bias={50: 1.0}), "logit_bias has token id 50"),
        (ask("a", [1], max_tokens=9, stop_token_ids=(-2,)), "stop_token_ids has token id -2"),
    ]
    for request, message in bad:
        with pytest.raises(ValueError, match=message):
            engine.submit(request)
        assert _books(engine) == before
    found = {"taken": Outcome()}
    _drain(found, engine)
    assert found["taken"].token_ids == plain_decode(ToyModel(), ask("taken", [1, 2], max_tokens=4))[0]


def _books(engine: Engine) -> tuple[Any, ...]:
    scheduler = engine.planner.schedulers[0]
    counts = scheduler.num_running, len(engine._live), scheduler._arrivals
    return list(scheduler.waiting), engine.pages_and_slots_in_use(), counts


class BrokenModel(ToyModel):
    """Fails in the forward pass of its `calls`-th step."""

    calls = 4

    def forward(self, token_ids: Tensor, metas: Sequence[AttentionMeta], kv: list[Tensor]) -> Tensor:
        self.calls -= 1
        if self.calls == 0:
            raise RuntimeError("out of memory")
        return super().forward(token_ids, metas, kv)


class BrokenDrafter(ToyDrafter):
    """Fails after the counts of its fourth step are out."""

    calls = 4

    def update(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        self.calls -= 1
        if self.calls == 0:
            raise RuntimeError("out of memory")
        return super().update(*args, **kwargs)


@pytest.mark.parametrize("schedule", ["ahead", "settled"])
@pytest.mark.parametrize(("broken", "max_tokens"), [("model", 4), ("model", 5), ("model", 100), ("drafter", 100)])
def test_a_step_that_fails_is_raised_to_the_reader_and_again(schedule: str, broken: str, max_tokens: int) -> None:
    """`max_tokens`: the failing step is the request's last, the one before, or one of many."""
    loaded = load_toy(make_drafter=BrokenDrafter if broken == "drafter" else None)
    if broken == "model":
        loaded = replace(loaded, model=BrokenModel())
    engine = toy_engine(loaded, schedule=schedule)
    stream = engine.submit(ask("a", [1, 2, 3], max_tokens=max_tokens, draft_tokens=0))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of memory"):
            for _ in stream:
                pass
    engine.close()


@pytest.mark.parametrize("schedule", ["ahead", "settled"])
def test_reading_on_after_close_does_not_hang(schedule: str) -> None:
    engine = toy_engine(load_toy(), schedule=schedule)
    stream = engine.submit(ask("a", [1, 2, 3], max_tokens=50))
    for _ in range(2):
        engine.step()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)


def _collect(found: dict[str, Outcome], engine: Engine) -> None:
    for chunk in engine.step():
        found[chunk.request_id].add(chunk)


def _drain(found: dict[str, Outcome], engine: Engine) -> None:
    while engine.has_work():
        _collect(found, engine)
    assert engine.pages_and_slots_in_use() == (0, 0)
    engine.close()


@pytest.mark.parametrize("schedule", ["ahead", "settled"])
def test_when_ranks_fail_every_chunk_still_comes(schedule: str) -> None:
    """Of a request aborted before, too; it ended as it was told to, the others with what befell the ranks."""
    engine = toy_engine(load_toy(), schedule=schedule)
    for name in ("a", "b", "c"):
        engine.submit(ask(name, [1, 2, 3], max_tokens=50))
    engine.step()

    def fail() -> list[StepResult]:
        raise RankFailure("rank 1 was killed")

    engine._channel.receive = fail  # type: ignore[method-assign]
    engine.abort("a")
    chunks = {}
    while engine.has_work():
        chunks.update({chunk.request_id: chunk for chunk in engine.step()})
    assert {i: chunk.finish_reason for i, chunk in chunks.items()} == {
        "a": FinishReason.ABORT, "b": FinishReason.ERROR, "c": FinishReason.ERROR
    }
    assert chunks["a"].error is None
    assert chunks["b"].error == chunks["c"].error == "rank 1 was killed"
    engine.close()
