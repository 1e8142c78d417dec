"""Runs requests through an engine over a toy model, and decodes them plainly: one token at a time, without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtp.noise import Purpose, gumbel
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.loading import LoadedModel
from runtime.request import FinishReason, GenerateRequest, RequestStats, SamplingParams, TokenChunk, TokenLogprobs
from runtime.sampling_params import GREEDY_BELOW
from tests.fakes import ToyModel
from tests.oracles.pipeline import processed_row


@dataclass(kw_only=True)
class Outcome:
    """All chunks of one request put together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    stats: RequestStats | None = None

    def add(self, chunk: TokenChunk) -> None:
        assert self.finish_reason is None, "a chunk after the last one"
        self.token_ids += chunk.token_ids
        self.text += chunk.text
        self.logprobs += chunk.logprobs
        self.chunk_sizes.append(len(chunk.token_ids))
        self.finish_reason, self.stop_reason, self.error = chunk.finish_reason, chunk.stop_reason, chunk.error
        self.stats = chunk.stats
        assert (chunk.stats is not None) == (chunk.finish_reason is not None)

    @property
    def counters(self) -> RequestStats:
        assert self.stats is not None
        return self.stats


def toy_engine(loaded: LoadedModel, **settings: Any) -> Engine:
    """An engine with small pages, debug checks and a context of 128 tokens, unless `settings` say otherwise."""
    defaults: dict[str, Any] = dict(
        max_num_seqs=8, page_size=4, prefill_chunk_size=16, debug=True, draft_tokens=1, max_model_len=128,
        schedule="ahead",
    )
    return Engine(EngineConfig(model=Path("toy"), **{**defaults, **settings}), loaded)


def ask(request_id: str | int, prompt: Sequence[int], **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(request_id), prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling)
    )


def run_all(
    engine: Engine, requests: Sequence[GenerateRequest], *, arrivals: Mapping[str, int] | None = None
) -> dict[str, Outcome]:
    """Submit each request before step `arrivals[id]` (0 unless given), step until nothing is left, and close."""
    due = sorted(requests, key=lambda request: (arrivals or {}).get(request.request_id, 0))
    outcomes = {request.request_id: Outcome() for request in requests}
    step = 0
    while due or engine.has_work():
        while due and (arrivals or {}).get(due[0].request_id, 0) <= step:
            engine.submit(due.pop(0))
        for chunk in engine.step():
            outcomes[chunk.request_id].add(chunk)
        step += 1
        assert step < 100_000, "the engine makes no progress"
    assert engine.pages_and_slots_in_use() == (0, 0)
    engine.close()
    return outcomes


def plain_decode(
    model: ToyModel, request: GenerateRequest, *, eos: Sequence[int] = (), max_model_len: int = 128
) -> tuple[list[int], FinishReason]:
    """Ids and finish reason of greedy or seeded (coupled) decoding, by the rules alone."""
    sampling, prompt = request.sampling, list(request.prompt_token_ids)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    output: list[int] = []
    while True:
        output.append(next_token(model, sampling, prompt, output, eos))
        if output[-1] in stops and len(output) > sampling.min_tokens:
            return output, FinishReason.STOP
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, FinishReason.LENGTH


def next_token(
    model: ToyModel, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int] = ()
) -> int:
    """The arg-max of processed logits, with the noise of the request's seed when it samples."""
    raw = model.plain_logits([*prompt, *output])[-1]
    scores = processed_row(raw.double().numpy(), sampling, prompt, output, eos)
    if sampling.temperature >= GREEDY_BELOW:
        assert sampling.seed is not None
        scores = scores + noise(sampling.seed, sampling.choice, len(scores))[len(prompt) + len(output)]
    return int(np.argmax(scores))


@lru_cache(maxsize=64)
def noise(seed: int, choice: int, vocab_size: int) -> np.ndarray:
    """[256, vocab_size] the target's Gumbel noise at each absolute position."""
    keys = (torch.full((256,), value) for value in (seed, choice))
    return gumbel(*keys, torch.arange(256), Purpose.TARGET, vocab_size).double().numpy()
