"""The logits pipeline against a slow float64 reference, and against transformers where both know the rule."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import runtime.sampling
from runtime.request import SamplingParams
from runtime.sampling import TokenCounts, process, token_logprobs
from runtime.sampling_params import encode_params, stack_params
from runtime.sampling_tables import PenaltyTable, SamplingRows, SamplingTable
from tests.oracles.pipeline import processed_row

VOCAB = 40
EOS = (7, 9)
INF = torch.inf


@dataclasses.dataclass
class Row:
    """A request in the middle of its life, and the drafts of a step."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    drafts: list[int]


def _random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: float, off: float) -> float:
        return value if rng.random() < 0.4 else off

    min_tokens = rng.choice([0, 0, 3, 6])
    return SamplingParams(
        temperature=maybe(0.0, rng.uniform(0.3, 2.0)),
        top_k=int(maybe(rng.randint(1, VOCAB + 5), 0)),
        top_p=maybe(rng.uniform(0.05, 1.0), 1.0),
        min_p=maybe(rng.uniform(0.01, 0.5), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(rng.choice([0, 0, 1, 5]))},
        min_tokens=min_tokens,
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 2]))),
        seed=rng.choice([None, 5]),
    )


def _random_rows(seed: int, num_rows: int, k: int) -> list[Row]:
    rng = random.Random(seed)

    def tokens(num: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(num)]

    return [
        Row(_random_params(rng), tokens(rng.randint(1, 6)), tokens(rng.randint(0, 5)), tokens(k))
        for _ in range(num_rows)
    ]


class Batch:
    """Rows in the device tables, at slots in reverse order."""

    def __init__(self, rows: list[Row]) -> None:
        num_slots = len(rows) + 2
        table, penalties = SamplingTable(num_slots, "cpu"), PenaltyTable(num_slots, VOCAB, "cpu")
        host_slots = np.arange(num_slots - 1, 1, -1)
        for slot, row in zip(host_slots, rows, strict=True):
            encoded = encode_params(row.params, prompt_len=len(row.prompt), default_seed=1, eos_token_ids=EOS)
            table.write(np.array([slot]), encoded)
            if row.params.uses_penalties:
                penalties.add(int(slot), row.prompt, row.output)
        slots = torch.from_numpy(host_slots)
        self.rows: SamplingRows = table.gather(slots, host_slots)
        output, in_prompt = penalties.gather(slots)
        self.counts = TokenCounts(output=output, in_prompt=in_prompt)
        self.lengths = torch.tensor([len(row.prompt) + len(row.output) for row in rows])
        self.drafts = torch.tensor([row.drafts for row in rows], dtype=torch.int64)

    def process(self, logits: Tensor, first: int = 0) -> Tensor:
        return process(logits, self.rows, self.lengths, self.drafts, self.counts, first=first)


def _logits(seed: int, num_rows: int, q_len: int) -> Tensor:
    return torch.randn(num_rows, q_len, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def _reference(logits: Tensor, rows: list[Row]) -> Tensor:
    return torch.stack(
        [
            torch.stack(
                [
                    torch.from_numpy(
                        processed_row(
                            logits[i, j].double().numpy(), row.params, row.prompt, row.output + row.drafts[:j], EOS
                        )
                    )
                    for j in range(logits.shape[1])
                ]
            )
            for i, row in enumerate(rows)
        ]
    )


def _assert_close(got: Tensor, wanted: Tensor) -> None:
    """The same tokens are removed, and the rest agrees; greedy rows keep what only the sampled ones remove."""
    assert torch.equal(got.isneginf(), wanted.isneginf())
    torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("seed", range(40))
def test_a_mixed_batch_equals_the_reference(seed: int) -> None:
    k = seed % 4
    rows = _random_rows(seed, 12, k)
    logits = _logits(seed, 12, k + 1)
    before = logits.clone()
    _assert_close(Batch(rows).process(logits), _reference(logits, rows))
    assert torch.equal(logits, before), "raw logits are needed for logprobs"


@pytest.mark.parametrize("seed", range(10))
def test_a_row_is_the_same_alone_and_in_a_batch(seed: int) -> None:
    rows = _random_rows(seed + 100, 12, 2)
    logits = _logits(seed, 12, 3)
    whole = Batch(rows).process(logits)
    for idx, row in enumerate(rows):
        one = slice(idx, idx + 1)
        alone = Batch([row])
        assert torch.equal(alone.process(logits[one]), whole[one])
        for first in range(3):  # drafts i are processed one by one, as position i of a verify row
            assert torch.equal(
                alone.process(logits[one, first : first + 1], first=first), whole[one, first : first + 1]
            )


@pytest.mark.parametrize("sort_above", [0, 3, VOCAB])
def test_sorting_and_finding_the_best_agree(sort_above: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _random_rows(77, 30, 1)
    for row in rows:
        row.params = dataclasses.replace(row.params, top_k=1 + row.params.top_k % 6)
    logits = _logits(77, 30, 2).round()  # many equals
    monkeypatch.setattr(runtime.sampling, "_SORT_ABOVE", sort_above)
    batch = Batch(rows)
    assert batch.rows.uses.top_p
    assert not batch.rows.uses.top_p_alone
    _assert_close(batch.process(logits), _reference(logits, rows))


def _apply(params: SamplingParams, scores: list[float]) -> list[float]:
    batch = Batch([Row(params, [0], [], [])])
    wide = torch.full((1, 1, VOCAB), -50.0)
    wide[0, 0, : len(scores)] = torch.tensor(scores)
    result: list[float] = batch.process(wide)[0, 0, : len(scores)].tolist()
    return result


def test_top_k_keeps_every_token_as_good_as_the_last_one() -> None:
    assert _apply(SamplingParams(temperature=1, top_k=2), [1, 3, 2, 2, 0]) == [-INF, 3, 2, 2, -INF]


def test_top_p_keeps_the_token_that_crosses_and_its_equals() -> None:
    scores = [float(np.log(p)) for p in (0.25, 0.4, 0.1, 0.25)]
    kept = [score > -INF for score in _apply(SamplingParams(temperature=1, top_p=0.41), scores)]
    assert kept == [True, True, False, True]
    kept = [score > -INF for score in _apply(SamplingParams(temperature=1, top_p=0.39), scores)]
    assert kept == [False, True, False, False]


def test_top_p_counts_what_top_k_left() -> None:
    scores = [float(np.log(p)) for p in (0.4, 0.3, 0.2, 0.1)]  # of the best two: 0.571 and 0.429
    kept = [score > -INF for score in _apply(SamplingParams(temperature=1, top_k=2, top_p=0.5), scores)]
    assert kept == [True, False, False, False]


def test_a_batch_without_options_is_not_touched() -> None:
    rows = [Row(SamplingParams(top_k=3, top_p=0.5, min_p=0.1), [1], [2], [3]) for _ in range(3)]
    logits = _logits(0, 3, 2)
    batch = Batch(rows)
    assert batch.process(logits) is logits
    assert not batch.rows.keys.any_sampled


def test_a_tiny_temperature_is_greedy() -> None:
    encoded = encode_params(SamplingParams(temperature=9e-6, top_p=0.5), prompt_len=1, default_seed=0, eos_token_ids=())
    assert encoded.rows["method"][0] == 0
    assert (encoded.rows["temperature"][0], encoded.rows["top_p"][0]) == (1, 1)


def test_nan_stays_in_its_row() -> None:
    params = SamplingParams(temperature=0.7, top_k=5, top_p=0.8, min_p=0.01, presence_penalty=1, min_tokens=9)
    rows = [Row(params, [1], [2], [3]) for _ in range(3)]
    logits = _logits(0, 3, 2)
    clean = Batch(rows).process(logits)
    logits[1, 0, 5] = torch.nan
    result = Batch(rows).process(logits)
    assert result[1, 0].isnan().any()
    assert torch.equal(result[[0, 2]], clean[[0, 2]])
    assert torch.equal(result[1, 1], clean[1, 1])


def test_min_tokens_counts_drafts() -> None:
    row = Row(SamplingParams(min_tokens=3, stop_token_ids=(4,), ignore_eos=True), [1, 2], [8], [3, 3, 3])
    result = Batch([row]).process(torch.zeros(1, 4, VOCAB))[0]
    masked = torch.zeros(4, VOCAB, dtype=torch.bool)
    masked[:2, [4, *EOS]] = True  # outputs of 1 and 2 tokens so far
    assert torch.equal(result.isneginf(), masked)


@pytest.mark.parametrize("seed", range(5))
def test_transformers_agrees(seed: int) -> None:
    rng = random.Random(seed)
    temperature, top_k, top_p, min_p = rng.uniform(0.4, 1.6), rng.randint(3, 30), rng.uniform(0.3, 0.95), 0.02
    repetition, bias, min_tokens = rng.uniform(1.05, 1.8), {rng.randrange(VOCAB): 2.5}, rng.choice([2, 8])
    rows = _random_rows(seed, 6, 0)
    for row in rows:
        row.prompt, row.output = (row.prompt * 6)[:4], (row.output + row.prompt * 6)[:3]
        row.params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition,
            logit_bias=bias,
            min_tokens=min_tokens,
        )
    text = torch.tensor([row.prompt + row.output for row in rows])
    processors = transformers.LogitsProcessorList(
        [
            transformers.SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()]),
            transformers.MinNewTokensLengthLogitsProcessor(4, min_tokens, list(EOS)),
            transformers.RepetitionPenaltyLogitsProcessor(repetition),
            transformers.TemperatureLogitsWarper(temperature),
            transformers.MinPLogitsWarper(min_p),
            transformers.TopKLogitsWarper(top_k),
            transformers.TopPLogitsWarper(top_p),
        ]
    )
    logits = _logits(seed, 6, 1)
    wanted = processors(torch.LongTensor(text), logits[:, 0].clone())
    _assert_close(Batch(rows).process(logits)[:, 0], wanted.double())


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = _logits(3, 4, 2)
    chosen = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    result = token_logprobs(logits, chosen, 3)
    wanted = logits.log_softmax(-1)
    torch.testing.assert_close(result.chosen, wanted.gather(2, chosen.unsqueeze(2)).squeeze(2))
    torch.testing.assert_close(result.top, wanted.sort(dim=2, descending=True).values[..., :3])
    torch.testing.assert_close(wanted.gather(2, result.top_ids), result.top)
    assert token_logprobs(logits, chosen, 0).top.shape == (4, 2, 0)


def test_stacked_parameters_are_written_as_one_by_one() -> None:
    rows = _random_rows(5, 9, 0)
    encoded = [encode_params(r.params, prompt_len=len(r.prompt), default_seed=1, eos_token_ids=EOS) for r in rows]
    one_by_one, at_once = SamplingTable(12, "cpu"), SamplingTable(12, "cpu")
    slots = np.array([3, 1, 9, 4, 2, 11, 5, 6, 10])
    for slot, part in zip(slots, encoded, strict=True):
        one_by_one.write(np.array([slot]), part)
    at_once.write(slots, stack_params(encoded))
    every = np.arange(12)
    a, b = (table.gather(torch.from_numpy(every), every) for table in (one_by_one, at_once))
    for name in ("temperature", "top_p", "min_tokens", "prompt_len", "bias_ids", "bias_values", "masked_ids"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.keys.seeds, b.keys.seeds)
    assert a.uses == b.uses
