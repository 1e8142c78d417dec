"""Speculative decoding of toy models: coupled ids are plain ids, ratio draws follow the target's law.

A toy model is a table of logits indexed by the last two tokens. The loop below is the engine's step without an engine:
thousands of rows with a seed each, drafts drawn one after the other, all positions judged at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from mtp.accept import DrawKeys, accept, draw
from runtime.request import SamplingParams
from runtime.sampling import TokenCounts, process
from runtime.sampling_params import encode_params
from runtime.sampling_tables import SamplingRows, SamplingTable
from tests.oracles.pipeline import processed_row, softmax

VOCAB = 8
PROMPT = (3, 1, 6)
EOS = (5,)
NUM_DRAWN = 3  # tokens whose joint law is tested
ROWS = 350_000  # times NUM_DRAWN: more than a million draws a setting
CHUNK = 50_000

Drafter = Callable[[Tensor, Tensor], Tensor]  # (last tokens [N, 2], positions [N]) -> logits [N, VOCAB]
Fault = Callable[[Tensor, Tensor], Tensor]  # (raw, processed) draft logits [N, k, VOCAB] -> what is passed as q


def _table(seed: int) -> Tensor:
    return torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


TARGET = _table(0)


def _resembling(noise: float) -> Drafter:
    table = TARGET + _table(1) * noise
    return lambda last, positions: table[last[:, 0], last[:, 1]]


def _unrelated(last: Tensor, positions: Tensor) -> Tensor:
    return _table(2)[positions % VOCAB, last[:, 1]]


def _one_hot(last: Tensor, positions: Tensor) -> Tensor:
    """Proposes the token after the last one, whatever the target thinks."""
    return torch.nn.functional.one_hot((last[:, 1] + 1) % VOCAB, VOCAB).float().log()


class Decoder:
    """Rows that decode together; `lengths` differ as soon as one accepts more than another."""

    def __init__(self, params: SamplingParams, seeds: Tensor, num_output: int, drafter: Drafter) -> None:
        self.num_rows, self.limit, self.drafter = len(seeds), len(PROMPT) + num_output, drafter
        table = SamplingTable(2, "cpu")
        encoded = encode_params(params, prompt_len=len(PROMPT), default_seed=0, eos_token_ids=EOS)
        table.write(np.array([1]), encoded)
        rows = table.gather(torch.ones(self.num_rows, dtype=torch.int64), np.array([1]))
        keys: DrawKeys = dataclasses.replace(rows.keys, seeds=seeds)
        self.rows: SamplingRows = dataclasses.replace(rows, keys=keys)
        self.tokens = torch.zeros(self.num_rows, self.limit + 8, dtype=torch.int64)
        self.tokens[:, : len(PROMPT)] = torch.tensor(PROMPT)
        self.lengths = torch.full((self.num_rows,), len(PROMPT))
        self.num_accepted = 0

    def _counts(self) -> TokenCounts | None:
        if not self.rows.uses.penalties:
            return None
        place = torch.arange(self.tokens.shape[1])
        is_output = (place >= len(PROMPT)) & (place < self.lengths.unsqueeze(1))
        output = torch.zeros(self.num_rows, VOCAB, dtype=torch.int32)
        output.scatter_add_(1, self.tokens, is_output.to(torch.int32))
        in_prompt = torch.zeros(VOCAB, dtype=torch.bool)
        in_prompt[list(PROMPT)] = True
        return TokenCounts(output=output, in_prompt=in_prompt.expand(self.num_rows, VOCAB))

    def step(self, k: int, fault: Fault | None = None) -> None:
        counts = self._counts()
        idx = torch.arange(self.num_rows)
        last = torch.stack([self.tokens[idx, self.lengths - 2], self.tokens[idx, self.lengths - 1]], dim=1)
        drafts = torch.empty(self.num_rows, k, dtype=torch.int64)
        raw, processed = [], []
        context = last
        for i in range(k):
            raw.append(self.drafter(context, self.lengths + i).unsqueeze(1))
            processed.append(process(raw[i], self.rows, self.lengths, drafts, counts, first=i))
            drafts[:, i] = draw(processed[i][:, 0], self.rows.keys, self.lengths + i, draft=True)
            context = torch.stack([context[:, 1], drafts[:, i]], dim=1)
        text = torch.cat([last, drafts], dim=1)  # [N, 2 + k]
        target = TARGET[text[:, :-1], text[:, 1:]]  # [N, 1 + k, VOCAB]
        q = torch.cat(processed, dim=1) if k else None
        if fault is not None and q is not None:
            q = fault(torch.cat(raw, dim=1), q)
        room = self.limit - self.lengths  # finished rows go on in place, and keep nothing
        result = accept(
            process(target, self.rows, self.lengths, drafts, counts),
            drafts,
            q,
            self.rows.keys,
            self.lengths,
            (room - 1).clamp(0, k),
        )
        assert not result.bad.any()
        self.num_accepted += int(result.num_accepted.sum())
        new = torch.cat([drafts, drafts.new_zeros(self.num_rows, 1)], dim=1)
        new[idx, result.num_accepted] = result.next_token
        place = torch.arange(k + 1)
        self.tokens.scatter_(1, self.lengths.unsqueeze(1) + place, new)
        self.lengths = torch.minimum(self.lengths + result.num_accepted + 1, torch.tensor(self.limit))

    def run(self, ks: tuple[int, ...], fault: Fault | None = None) -> Tensor:
        """Output ids [N, num_output]; `ks` is the number of drafts of each step, over and over."""
        steps = 0
        while bool((self.lengths < self.limit).any()):
            self.step(ks[steps % len(ks)], fault)
            steps += 1
        return self.tokens[:, len(PROMPT) : self.limit]


PLAIN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.7, top_k=6, top_p=0.9)
PENALISED = SamplingParams(
    temperature=1.3, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7, min_tokens=2
)
MIXED = SamplingParams(temperature=0.9, min_p=0.05, top_p=0.95, frequency_penalty=1.0, logit_bias={2: 1.5})


@pytest.mark.parametrize("params", [PLAIN, FILTERED, PENALISED, MIXED, SamplingParams(presence_penalty=0.6)])
@pytest.mark.parametrize("drafter", [_resembling(0.3), _unrelated, _one_hot])
@pytest.mark.parametrize("ks", [(1,), (2,), (5,), (3, 0, 1)])
def test_coupled_and_greedy_ids_are_plain_ids(params: SamplingParams, drafter: Drafter, ks: tuple[int, ...]) -> None:
    coupled = dataclasses.replace(params, acceptance="coupled")
    seeds = torch.arange(300) * 1_000_003
    plain = Decoder(coupled, seeds, 24, drafter).run((0,))
    speculative = Decoder(coupled, seeds, 24, drafter)
    assert torch.equal(speculative.run(ks), plain)
    if params.temperature:
        assert speculative.num_accepted > 0
        assert len({tuple(row) for row in plain.tolist()}) > 290


def test_coupled_drafts_pass_nearly_as_often_as_ratio_drafts() -> None:
    rates = {}
    for form in ("coupled", "ratio"):
        decoder = Decoder(dataclasses.replace(PLAIN, acceptance=form), torch.arange(20_000), 2, _resembling(0.3))
        decoder.step(1)
        rates[form] = decoder.num_accepted / 20_000
    assert 0.8 < rates["coupled"] < rates["ratio"] < 0.95


def _joint_law(params: SamplingParams) -> NDArray[np.float64]:
    """P(x1, x2, x3) [VOCAB ** 3] from the float64 pipeline."""
    law = np.ones((VOCAB,) * NUM_DRAWN)
    for num_output in range(NUM_DRAWN):
        for output in product(range(VOCAB), repeat=num_output):
            text = (*PROMPT, *output)
            logits = TARGET[text[-2], text[-1]].double().numpy()
            p = softmax(processed_row(logits, params, PROMPT, output, EOS))
            law[output] *= p.reshape((VOCAB,) + (1,) * (NUM_DRAWN - 1 - num_output))
    return law.flatten()


def _p_value(
    params: SamplingParams, ks: tuple[int, ...], drafter: Drafter, num_rows: int = ROWS, fault: Fault | None = None
) -> float:
    """Chi-square of the joint law of NUM_DRAWN tokens; 0 when an impossible text was drawn."""
    counts = np.zeros(VOCAB**NUM_DRAWN)
    for begin in range(0, num_rows, CHUNK):
        seeds = torch.arange(begin, min(begin + CHUNK, num_rows)) + 17
        ids = Decoder(params, seeds, NUM_DRAWN, drafter).run(ks, fault)
        cells = (ids * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
        counts += torch.bincount(cells, minlength=len(counts)).numpy()
    expected = _joint_law(params) * num_rows
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    keep = wanted > 0
    return float(stats.chisquare(observed[keep], wanted[keep]).pvalue)


RATIO_SETTINGS = [
    (PLAIN, (1,), _resembling(0.5)),
    (PLAIN, (3,), _unrelated),
    (FILTERED, (2,), _resembling(0.5)),
    (PENALISED, (2,), _resembling(0.5)),
    (MIXED, (3, 0, 1), _resembling(1.0)),
    (PLAIN, (2,), _one_hot),
]


@pytest.mark.parametrize(("params", "ks", "drafter"), RATIO_SETTINGS)
def test_ratio_draws_follow_the_target(params: SamplingParams, ks: tuple[int, ...], drafter: Drafter) -> None:
    assert _p_value(params, ks, drafter) > 1e-4


def test_coupled_draws_follow_the_target() -> None:
    assert _p_value(dataclasses.replace(FILTERED, acceptance="coupled"), (2,), _resembling(0.5)) > 1e-4


def _raw(raw: Tensor, processed: Tensor) -> Tensor:
    return raw


def _stale(raw: Tensor, processed: Tensor) -> Tensor:
    """Each draft judged by the distribution of the draft before it."""
    return processed.roll(1, dims=1)


@pytest.mark.parametrize(
    ("params", "fault"), [(FILTERED, _raw), (PENALISED, _raw), (PLAIN, _stale), (FILTERED, _stale)]
)
def test_a_wrong_q_is_found(params: SamplingParams, fault: Fault) -> None:
    assert _p_value(params, (2,), _resembling(0.5), CHUNK) > 1e-4
    assert _p_value(params, (2,), _resembling(0.5), CHUNK, fault) < 1e-9


def test_penalties_blind_to_drafts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = process

    def blind(
        logits: Tensor, rows: SamplingRows, lengths: Tensor, drafts: Tensor, counts: TokenCounts, *, first: int = 0
    ) -> Tensor:
        positions = [
            whole(logits[:, j : j + 1], rows, lengths + first + j, None, counts) for j in range(logits.shape[1])
        ]
        return torch.cat(positions, dim=1)

    monkeypatch.setitem(globals(), "process", blind)
    assert _p_value(PENALISED, (2,), _resembling(0.5), CHUNK) < 1e-9
