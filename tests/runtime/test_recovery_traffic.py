"""Ranks lost at any call of random traffic: every request puts out what it puts out undisturbed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.loading import LoadedModel
from runtime.request import FinishReason, GenerateRequest
from runtime.serve.detokenizer import DetokenizerFactory
from tests.fakes import load_toy
from tests.runtime.driving import Outcome, ask
from tests.runtime.failing_channel import Strikes, failing_toy

EOS = (7,)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.4, "logprobs": 2},
    {"temperature": 1.0, "seed": 1, "logprobs": 0},
    {"temperature": 0.9, "seed": 4, "min_p": 0.1, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 6, "logit_bias": {3: 2.0, 11: -100.0}, "min_tokens": 9},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": tuple(range(20, 27)), "draft_tokens": 1, "logprobs": 3},
    {"ignore_eos": True, "draft_tokens": 0},
    {"temperature": 1.0, "acceptance": "ratio", "ignore_eos": True},
)
RATIO, ABORTED = {"7", "15"}, {"3", "9", "14"}


def settings_of(**changes: Any) -> EngineConfig:
    k = changes.pop("k", 1)
    defaults: dict[str, Any] = dict(
        max_num_seqs=4, page_size=4, prefill_chunk_size=8, debug=True, max_model_len=72, schedule="ahead",
        draft_tokens=k, draft_method="mtp" if k else "off",
    )
    return EngineConfig(model=Path("toy"), **{**defaults, **changes})


@cache
def toy(draft: bool) -> LoadedModel:
    tokenizer = Tokenizer.from_file(str(Path(__file__).parents[2] / "configs" / "minnow" / "tokenizer.json"))
    return load_toy(draft=draft, eos=EOS, detokenizers=DetokenizerFactory(tokenizer))


@cache
def workload() -> tuple[GenerateRequest, ...]:
    """Prompts of one token to several chunks, half of them beginning alike; one stops at a string of its own output."""
    rng = random.Random(3)
    shared = [rng.randrange(8, 50) for _ in range(12)]
    requests = []
    for i, length in enumerate((1, 9, 17, 30, 5, 16, 2, 12, 24, 8, 3, 33, 13, 20, 40, 6)):
        own = [rng.randrange(8, 50) for _ in range(length)]
        prompt = [*shared, *own][:length] if i % 2 else own
        requests.append(ask(i, prompt, max_tokens=rng.randrange(9, 22), **SAMPLINGS[i % len(SAMPLINGS)]))
    plain = drive(settings_of(k=0), requests)[0]["8"].text
    requests[8] = ask(8, requests[8].prompt_token_ids, max_tokens=20, stop=(plain[3:6],))
    return tuple(requests)


def drive(
    config: EngineConfig, requests: Sequence[GenerateRequest], calls: Sequence[int] = (), attempts: Sequence[int] = (),
    gap: int = 1,
) -> tuple[dict[str, Outcome], Strikes, Engine]:
    """Requests arrive `gap` steps apart; some are aborted when they have put out a little."""
    engine, strikes = failing_toy(config, toy(config.k > 0), calls, attempts)
    found = {request.request_id: Outcome() for request in requests}
    due, step = list(requests), 0
    while due or engine.has_work():
        while due and step >= gap * (len(requests) - len(due)):
            engine.submit(due.pop(0))
        for chunk in engine.step():
            found[chunk.request_id].add(chunk)
        for name in ABORTED & found.keys():
            if found[name].finish_reason is None and len(found[name].token_ids) >= 3:
                engine.abort(name)
        step += 1
        assert step < 5_000, "the engine makes no progress"
    assert engine.pages_and_slots_in_use() == (0, 0)
    engine.close()
    return found, strikes, engine


@cache
def undisturbed() -> dict[str, Outcome]:
    return drive(settings_of(k=0), workload())[0]


def assert_undisturbed(found: dict[str, Outcome], requests: Sequence[GenerateRequest]) -> None:
    for request in requests:
        name = request.request_id
        outcome, plain = found[name], undisturbed()[name]
        if request.sampling.logprobs is not None:
            assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids
        if name in RATIO:
            assert (len(outcome.token_ids), outcome.finish_reason) == (request.sampling.max_tokens, FinishReason.LENGTH)
        elif name in ABORTED:
            shorter = min(len(outcome.token_ids), len(plain.token_ids))
            assert outcome.token_ids[:shorter] == plain.token_ids[:shorter]
            assert outcome.finish_reason is FinishReason.ABORT
        else:
            assert outcome.token_ids == plain.token_ids
            assert (outcome.text, outcome.finish_reason, outcome.stop_reason) == (
                plain.text, plain.finish_reason, plain.stop_reason
            )
            for entry, expected in zip(outcome.logprobs, plain.logprobs, strict=True):
                assert np.isclose(entry.logprob, expected.logprob, atol=1e-4)
                assert [i for i, _ in entry.top] == [i for i, _ in expected.top]


def test_the_workload_covers_what_it_should() -> None:
    plain = undisturbed()
    stops = {name: o.stop_reason for name, o in plain.items() if o.finish_reason is FinishReason.STOP}
    assert isinstance(stops["8"], str)
    assert any(isinstance(reason, int) for reason in stops.values())
    assert None in stops.values()
    assert {name for name, o in plain.items() if o.finish_reason is FinishReason.ABORT} == ABORTED


AXES: dict[str, tuple[Any, ...]] = dict(
    k=(0, 1, 2, 3), prefill_chunk_size=(3, 8, 64), num_pages=(20, 60), prefix_cache=(True, False),
    max_num_seqs=(1, 3, 8), schedule=("ahead", "settled"), dp=(1, 1, 2, 3), split=("off", "on"), gap=(0, 1, 4),
)


@pytest.mark.parametrize("seed", range(8))
def test_random_strikes_change_nothing(seed: int) -> None:
    """Any shape of deployment, up to 14 failures, some of them one after the other, and attempts that fail."""
    rng = random.Random(seed)
    chosen = {name: rng.choice(values) for name, values in AXES.items()}
    gap = chosen.pop("gap")
    config = settings_of(**chosen)
    calls = {rng.randrange(90) for _ in range(10)}
    calls |= {call + 1 for call in list(calls)[:4]}
    found, strikes, _ = drive(config, workload(), sorted(calls), [1, 4, 5], gap)
    assert len(strikes.struck) >= 5
    assert_undisturbed(found, workload())


@pytest.mark.parametrize("stride", [16, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["ahead", "settled"])
@pytest.mark.parametrize("k", [0, 2])
def test_a_strike_at_every_single_call(k: int, schedule: str, stride: int) -> None:
    """A pool for one request and a half, and chunks of 3: waiting, in the middle of a prompt, decoding, preempted, with
    steps in flight and without. Without `slow` only every so many calls; a step makes three."""
    config = settings_of(k=k, schedule=schedule, num_pages=11, max_num_seqs=3, prefill_chunk_size=3, max_model_len=48)
    requests = [workload()[i] for i in (2, 4, 6)]
    found, strikes, engine = drive(config, requests)
    assert engine.planner.schedulers[0].num_preemptions
    assert_undisturbed(found, requests)
    struck = set()
    for call in range(0, strikes.num_calls, stride):
        found, again, _ = drive(config, requests, [call])
        assert again.num_attempts == 1
        struck |= set(again.struck)
        assert_undisturbed(found, requests)
    assert struck == {"look", "send", "receive"}


def test_the_comparison_sees_what_a_careless_recovery_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contrast: were the token that the lost step yielded to be thrown away after it had gone out, ids repeat."""
    from runtime.scheduler import Scheduler

    careful: Callable[[Scheduler], None] = Scheduler.restart

    def careless(self: Scheduler) -> None:
        for state in self._state_of_slot:
            if state is not None and state.resumes:
                state.tokens.pop()
        careful(self)

    requests = [workload()[i] for i in (2, 4, 6)]
    undisturbed()
    monkeypatch.setattr(Scheduler, "restart", careless)
    found = drive(settings_of(k=2), requests, [20])[0]
    with pytest.raises(AssertionError):
        assert_undisturbed(found, requests)
