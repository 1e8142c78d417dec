"""The ratio form end to end: the joint law of three consecutive tokens is the target's, for every k and pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from mtp.drafter import Drafts
from runtime.request import SamplingParams
from tests.fakes import ToyDrafter, ToyModel, load_toy
from tests.oracles.pipeline import processed_row, softmax
from tests.runtime.driving import ask, toy_engine

VOCAB = 8
PROMPT = (3, 1, 6)
SHARPNESS, ERROR = 10.0, 2.5  # laws far from uniform, a head far from the target


def law(sampling: SamplingParams, first: int) -> np.ndarray:
    """[VOCAB ** 3] joint law of output tokens first .. first + 2, those before summed over."""
    model = ToyModel(vocab_size=VOCAB, sharpness=SHARPNESS)
    joint = np.zeros((VOCAB,) * 3)

    def descend(output: tuple[int, ...], probability: float) -> None:
        if len(output) == first + 3:
            joint[output[first:]] += probability
            return
        raw = model.plain_logits([*PROMPT, *output])[-1].double().numpy()
        for token_id, p in enumerate(softmax(processed_row(raw, sampling, PROMPT, output))):
            if p > 0:
                descend((*output, token_id), probability * p)

    descend((), 1.0)
    assert joint.sum() == pytest.approx(1.0)
    return joint.ravel()


def draw(
    k: int, first: int, sampling: Mapping[str, Any], num_requests: int, make_drafter: type[ToyDrafter] = ToyDrafter
) -> tuple[np.ndarray, float]:
    """Counts [VOCAB ** 3] of those tokens over many requests, and the share of drafts that passed."""
    loaded = load_toy(vocab_size=VOCAB, sharpness=SHARPNESS, error=ERROR, make_drafter=make_drafter)
    engine = toy_engine(
        loaded, draft_tokens=k, max_num_seqs=512, prefill_chunk_size=2048, page_size=16, max_model_len=16, debug=False
    )
    num_tokens = max(first + 3, 2 + k)  # room for k drafts in the first verify row
    for seed in range(num_requests):
        engine.submit(ask(seed, PROMPT, acceptance="ratio", seed=seed, max_tokens=num_tokens, **sampling))
    outputs: dict[str, list[int]] = {}
    drafted = accepted = 0
    while engine.has_work():
        for chunk in engine.step():
            outputs.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            if chunk.stats is not None:
                drafted, accepted = drafted + chunk.stats.drafted, accepted + chunk.stats.accepted
    engine.close()
    tokens = np.array(list(outputs.values()))[:, first : first + 3]
    assert len(tokens) == num_requests
    cells = tokens @ np.array([VOCAB * VOCAB, VOCAB, 1])
    return np.bincount(cells, minlength=VOCAB**3), accepted / max(drafted, 1)


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts against a law; cells that expect fewer than 5 are put together."""
    assert counts[expected == 0].sum() == 0, "a token that the pipeline removes was drawn"
    order = np.argsort(expected)[::-1]
    counts, weights = counts[order], expected[order] * counts.sum()
    big = int((weights >= 5).sum())
    observed = np.append(counts[:big], counts[big:].sum())
    predicted = np.append(weights[:big], weights[big:].sum())
    if predicted[-1] < 5:  # too small a rest joins the smallest cell
        observed, predicted = (np.append(a[:-2], a[-2:].sum()) for a in (observed, predicted))
    return float(stats.chisquare(observed, predicted * observed.sum() / predicted.sum()).pvalue)


# k, first token of the three, sampling. With k = 3 the three come after the prompt's own token: all are drafted.
SETTINGS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (1, 0, {"temperature": 1.0}),
    (1, 0, {"temperature": 0.6, "top_k": 4, "top_p": 0.9}),
    (1, 0, {"temperature": 1.4, "repetition_penalty": 1.6, "frequency_penalty": 0.4, "presence_penalty": 0.3}),
    (3, 1, {"temperature": 1.0, "top_p": 0.8}),
    (3, 1, {"temperature": 1.3, "min_p": 0.05, "frequency_penalty": 0.8}),
    (3, 0, {"temperature": 0.8, "logit_bias": {2: 1.5, 5: -100.0}, "draft_tokens": 2}),
)


@pytest.mark.parametrize("num_requests", [6_000, pytest.param(80_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("k", "first", "sampling"), SETTINGS)
def test_three_tokens_follow_the_law_of_the_target(
    k: int, first: int, sampling: dict[str, Any], num_requests: int
) -> None:
    counts, acceptance = draw(k, first, sampling, num_requests)
    assert 0.2 < acceptance < 0.95, "the head is neither useless nor the target itself"
    assert p_value(counts, law(SamplingParams(acceptance="ratio", **sampling), first)) > 1e-4


class RawQ(ToyDrafter):
    """Hands on the raw logits as q, where the drafts were drawn from processed ones."""

    def propose(self, k: int, carried: Mapping[str, Tensor], draw: Any, *args: Any, **kwargs: Any) -> Drafts:
        def draw_but_return_raw(i: int, logits: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            return draw(i, logits, before)[0], logits

        return super().propose(k, carried, draw_but_return_raw, *args, **kwargs)


class StaleQ(ToyDrafter):
    """Hands on the q of the step before: of the request's newest token but one."""

    def carried_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**super().carried_shapes(), "stale": (VOCAB,)}

    def propose(self, k: int, carried: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Drafts:
        drafts = super().propose(k, carried, *args, **kwargs)
        assert drafts.logits is not None
        logits = torch.cat((carried["stale"].unsqueeze(1), drafts.logits[:, 1:]), 1)
        return Drafts(token_ids=drafts.token_ids, logits=logits)

    def update(
        self, token_ids: Tensor, hidden: Tensor, metas: Any, kv: Any, carry_index: Tensor
    ) -> dict[str, Tensor]:
        states = self._head.forward(token_ids, hidden, metas, kv)
        state = states[carry_index]
        stale = states[(carry_index - 1).clamp(min=0)]
        return {"state": state, "stale": self._head.logits(stale)}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("make_drafter", "sampling"), [(RawQ, {"temperature": 0.6}), (StaleQ, {"temperature": 1.0})])
def test_a_wrong_q_fails_the_same_test(k: int, make_drafter: type[ToyDrafter], sampling: dict[str, Any]) -> None:
    counts, _ = draw(k, 0, sampling, 3_000, make_drafter)
    assert p_value(counts, law(SamplingParams(acceptance="ratio", **sampling), 0)) < 1e-4


@pytest.mark.parametrize("change", [lambda law: np.roll(law, 1), lambda law: 0.97 * law + 0.03 / len(law)])
def test_a_slightly_wrong_law_would_be_noticed(change: Callable[[np.ndarray], np.ndarray]) -> None:
    expected = law(SamplingParams(temperature=1.0), 0)
    counts = np.random.default_rng(0).multinomial(8_000, expected)
    assert p_value(counts, expected) > 1e-4 > p_value(counts, change(expected))
