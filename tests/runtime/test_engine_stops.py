"""Where outputs end: EOS, stop ids, stop strings, both length limits, in the order of tokens and inside drafts."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from runtime.loading import LoadedModel
from runtime.request import FinishReason, GenerateRequest
from runtime.serve.detokenizer import DetokenizerFactory
from tests.fakes import ToyModel, load_toy
from tests.runtime.driving import Outcome, ask, plain_decode, run_all, toy_engine

PROMPT = (3, 14, 15, 9, 26)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@cache
def plain(vocab_size: int = 50, count: int = 40) -> list[int]:
    return plain_decode(ToyModel(vocab_size=vocab_size), ask(0, PROMPT, max_tokens=count, ignore_eos=True))[0]


def first_time(token_id: int) -> int:
    """Length of the plain output that ends with the first `token_id`."""
    return plain().index(token_id) + 1


def rare() -> list[int]:
    """Tokens of the plain output, in order of their first appearance."""
    return list(dict.fromkeys(plain()))


def decode(request: GenerateRequest, *, k: int, eos: tuple[int, ...] = (), **settings: Any) -> Outcome:
    """One request; its drafts nearly all pass, so that most stops fall inside accepted drafts."""
    engine = toy_engine(load_toy(draft=k > 0, eos=eos, error=0.0), draft_tokens=k, **settings)
    return run_all(engine, [request])[request.request_id]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("schedule", ["ahead", "settled"])
def test_every_place_for_a_stop(k: int, schedule: str) -> None:
    """Each token of the output in turn is EOS, or a stop id: first token, accepted draft, last of a row, bonus."""
    cut_inside = 0
    requests = [ask(token_id, PROMPT, max_tokens=40, stop_token_ids=(token_id,)) for token_id in rare()]
    engine = toy_engine(load_toy(draft=k > 0, error=0.0), draft_tokens=k, schedule=schedule)
    found = run_all(engine, requests)
    for token_id in rare():
        length, outcome = first_time(token_id), found[str(token_id)]
        assert outcome.token_ids == plain()[:length]
        assert (outcome.finish_reason, outcome.stop_reason) == (STOP, token_id)
        assert outcome.counters.num_output_tokens == length
        cut_inside += 1 + outcome.counters.steps + outcome.counters.accepted > length
    assert cut_inside >= 3 or k == 0
    for token_id in rare()[:6]:
        outcome = decode(ask(0, PROMPT, max_tokens=40), k=k, eos=(token_id,), schedule=schedule)
        assert outcome.token_ids == plain()[: first_time(token_id)]
        assert (outcome.finish_reason, outcome.stop_reason) == (STOP, None)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_first_stop_in_token_order_wins(k: int) -> None:
    early, late = rare()[4], rare()[8]
    for eos, stop_id, reason in ((early, late, None), (late, early, early)):
        outcome = decode(ask(0, PROMPT, max_tokens=40, stop_token_ids=(stop_id,)), k=k, eos=(eos,))
        assert (outcome.token_ids, outcome.stop_reason) == (plain()[: first_time(early)], reason)
    length = first_time(early)
    for max_tokens, finish in ((length - 1, LENGTH), (length, STOP), (length + 1, STOP)):
        outcome = decode(ask(0, PROMPT, max_tokens=max_tokens), k=k, eos=(early,))
        assert (len(outcome.token_ids), outcome.finish_reason) == (min(length, max_tokens), finish)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_token_that_is_both_eos_and_stop_id_is_reported_as_stop_id(k: int) -> None:
    token_id = rare()[3]
    outcome = decode(ask(0, PROMPT, max_tokens=40, stop_token_ids=(token_id,)), k=k, eos=(token_id,))
    assert (outcome.finish_reason, outcome.stop_reason) == (STOP, token_id)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_ignored_eos_does_not_stop_and_stop_ids_still_do(k: int) -> None:
    eos, stop_id = rare()[2], rare()[9]
    ignoring = decode(ask(0, PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=(stop_id,)), k=k, eos=(eos,))
    assert ignoring.token_ids == plain()[: first_time(stop_id)]
    both = decode(ask(0, PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=(eos,)), k=k, eos=(eos,))
    assert (both.token_ids, both.stop_reason) == (plain()[: first_time(eos)], eos)


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("min_tokens", [1, 2, 5, 6, 7, 12])
def test_min_tokens_bars_eos_and_stop_ids_at_every_verified_position(k: int, min_tokens: int) -> None:
    eos, stop_id = rare()[1], rare()[5]
    request = ask(0, PROMPT, max_tokens=30, min_tokens=min_tokens, stop_token_ids=(stop_id,))
    expected = plain_decode(ToyModel(), request, eos=(eos,))
    outcome = decode(request, k=k, eos=(eos,))
    assert (outcome.token_ids, outcome.finish_reason) == expected
    assert not {eos, stop_id} & {*outcome.token_ids[:min_tokens]}


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9])
def test_max_tokens(k: int, max_tokens: int) -> None:
    outcome = decode(ask(0, PROMPT, max_tokens=max_tokens), k=k)
    assert outcome.token_ids == plain()[:max_tokens]
    assert outcome.finish_reason is LENGTH
    assert outcome.counters.steps + outcome.counters.accepted + 1 == max_tokens, "acceptance is capped on the device"


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("prompt_len", [1, 4, 18, 19])
@pytest.mark.parametrize("page_size", [4, 20, 32])
def test_the_context_limit(k: int, prompt_len: int, page_size: int) -> None:
    """Rows near it still draft; a neighbour of another length is not disturbed by what they write."""
    prompts = [[5, 7, 1, 30] * 5] * 3
    requests = [ask(0, prompts[0][:prompt_len], max_tokens=None), ask(1, prompts[1][:2], max_tokens=18)]
    engine = toy_engine(load_toy(draft=k > 0), draft_tokens=k, max_model_len=20, page_size=page_size)
    found = run_all(engine, requests)
    for request in requests:
        outcome = found[request.request_id]
        assert (outcome.token_ids, outcome.finish_reason) == plain_decode(ToyModel(), request, max_model_len=20)
        assert len(request.prompt_token_ids) + len(outcome.token_ids) == 20


def test_a_stop_cuts_ids_logprobs_and_counts_at_the_same_token() -> None:
    requests = [ask(token_id, PROMPT, max_tokens=40, stop_token_ids=(token_id,), logprobs=2) for token_id in rare()]
    found = run_all(toy_engine(load_toy(error=0.0), draft_tokens=3), requests)
    for token_id in rare():
        outcome, length = found[str(token_id)], first_time(token_id)
        assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids == plain()[:length]
        assert sum(outcome.chunk_sizes) == outcome.counters.num_output_tokens == length


# --- stop strings, with the embedded model's tokenizer ---------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(minnow: Path) -> Tokenizer:
    return Tokenizer.from_file(str(minnow / "tokenizer.json"))


def loaded_with_text(tokenizer: Tokenizer, k: int) -> LoadedModel:
    return load_toy(vocab_size=4096, draft=k > 0, error=0.0, detokenizers=DetokenizerFactory(tokenizer))


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Decoded text after each token."""
    return [tokenizer.decode(ids[: i + 1], skip_special_tokens=True) for i in range(len(ids))]


def expected_stop(tokenizer: Tokenizer, ids: list[int], stop: str) -> tuple[str, list[int]]:
    """Text up to the stop string, and ids up to the token that completes it."""
    for i, text in enumerate(texts(tokenizer, ids)):
        if stop in text:
            return text[: text.index(stop)], ids[: i + 1]
    return texts(tokenizer, ids)[-1], ids


@pytest.mark.parametrize("k", [0, 1, 3])
def test_stop_strings_wherever_they_end(k: int, tokenizer: Tokenizer) -> None:
    """Pieces of the output of all lengths, most of them across tokens; one that never comes; one inside a token."""
    ids = plain(4096)
    whole = texts(tokenizer, ids)[-1]
    rng = random.Random(0)
    begins = [rng.randrange(len(whole) - 8) for _ in range(14)]
    stops = [whole[begin : begin + rng.randrange(1, 8)] for begin in begins]
    stops = [s for s in stops if "\ufffd" not in s] + ["\x00never"]
    assert len(stops) > 8
    requests = [ask(i, PROMPT, max_tokens=40, stop=(s,), logprobs=0) for i, s in enumerate(stops)]
    found = run_all(toy_engine(loaded_with_text(tokenizer, k), draft_tokens=k), requests)
    cut_inside = 0
    for i, stop in enumerate(stops):
        outcome, (text, kept) = found[str(i)], expected_stop(tokenizer, ids, stop)
        assert (outcome.text, outcome.token_ids) == (text, kept)
        assert [entry.token_id for entry in outcome.logprobs] == kept
        stopped = stop in whole
        assert (outcome.finish_reason, outcome.stop_reason) == ((STOP, stop) if stopped else (LENGTH, None))
        cut_inside += 1 + outcome.counters.steps + outcome.counters.accepted > len(kept)
    assert cut_inside or k == 0


@pytest.mark.parametrize("k", [0, 3])
def test_text_without_a_stop_is_the_whole_decode(k: int, tokenizer: Tokenizer) -> None:
    outcome = run_all(toy_engine(loaded_with_text(tokenizer, k), draft_tokens=k), [ask(0, PROMPT, max_tokens=40)])["0"]
    assert outcome.text == texts(tokenizer, plain(4096))[-1]


@pytest.mark.parametrize("k", [0, 3])
def test_the_earliest_of_several_stops_wins_and_min_tokens_holds_them_off(k: int, tokenizer: Tokenizer) -> None:
    ids = plain(4096)
    after = texts(tokenizer, ids)
    third, ninth = after[2][len(after[1]) :], after[8][len(after[7]) :]
    assert third.strip() not in after[1]
    assert ninth.strip() not in after[7]
    loaded = loaded_with_text(tokenizer, k)
    both = ask("both", PROMPT, max_tokens=40, stop=(ninth, third))
    later = ask("later", PROMPT, max_tokens=40, stop=(ninth, third), min_tokens=5)
    with_id = ask("id", PROMPT, max_tokens=40, stop=(ninth,), stop_token_ids=(ids[5],))
    found = run_all(toy_engine(loaded, draft_tokens=k), [both, later, with_id])
    assert (found["both"].stop_reason, found["both"].token_ids) == (third, ids[:3])
    assert found["both"].text == after[1]
    assert found["later"].token_ids == ids[: len(found["later"].token_ids)]
    assert len(found["later"].token_ids) > 5
    assert found["later"].text.startswith(after[4])
    assert (found["id"].stop_reason, found["id"].token_ids) == (ids[5], ids[: ids.index(ids[5]) + 1])
    assert found["id"].text == after[ids.index(ids[5]) - 1]
