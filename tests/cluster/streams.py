"""Client streams through the engine, over and over, each checked against the ids of an undisturbed process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.request import FinishReason, GenerateRequest, SamplingParams, TokenChunk

NUM_STREAMS = 8
OUTPUT_LEN = 48
MAX_SHIFT = 8  # tokens lost or repeated in a row that are still recognised as such

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.8, "seed": 11}, {"repetition_penalty": 1.2}, {"temperature": 1.0, "seed": 12, "top_p": 0.9},
)


def requests(num_streams: int = NUM_STREAMS, output_len: int = OUTPUT_LEN) -> list[GenerateRequest]:
    """One request a stream, prompts of 5 to 40 tokens; all of a fixed length, so that what is missing is seen."""
    return [
        GenerateRequest(
            request_id=str(i), prompt_token_ids=tuple(range(100 + 40 * i, 105 + 45 * i)),
            sampling=SamplingParams(max_tokens=output_len, ignore_eos=True, **SAMPLINGS[i % len(SAMPLINGS)]),
        )
        for i in range(num_streams)
    ]


def references(config: EngineConfig, asked: Sequence[GenerateRequest]) -> list[list[int]]:
    """Ids of each request in one process that nothing befalls."""
    engine = Engine(replace(config, dp=1, tp=1))
    found: dict[str, list[int]] = {request.request_id: [] for request in asked}
    for request in asked:
        engine.submit(request)
    while engine.has_work():
        for chunk in engine.step():
            found[chunk.request_id] += chunk.token_ids
    engine.close()
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How an output differs from what it should be; all zero or None when it does not."""

    num_lost: int = 0
    num_repeated: int = 0
    differs_at: int | None = None


def judge(found: Sequence[int], expected: Sequence[int]) -> Verdict:
    """The first difference: tokens left out, tokens that came again, or another choice of the model."""
    found, expected = list(found), list(expected)
    if found == expected:
        return Verdict()
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    if at is None:
        missing = len(expected) - len(found)
        common = min(len(found), len(expected))
        return Verdict(num_lost=max(missing, 0), num_repeated=max(-missing, 0), differs_at=common)
    for shift in range(1, MAX_SHIFT + 1):
        if _continues(found[at:], expected[at + shift :]):
            return Verdict(num_lost=shift, differs_at=at)
        if at >= shift and _continues(found[at:], expected[at - shift :]):
            return Verdict(num_repeated=shift, differs_at=at)
    return Verdict(differs_at=at)


def _continues(found: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether one goes on like the other, as far as both go; a few tokens must agree."""
    common = min(len(found), len(expected))
    return common >= 3 and list(found[:common]) == list(expected[:common])


@dataclass(kw_only=True)
class Tally:
    """What has become of the requests that ended."""

    num_finished: int = 0
    num_restarted: int = 0  # of those, how many lived through a loss of ranks
    num_lost_tokens: int = 0
    num_repeated_tokens: int = 0
    differences: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Streams:
    """Drives an engine: every stream asks for its request, reads it to the end, and asks again."""

    def __init__(self, engine: Engine, asked: Sequence[GenerateRequest], expected: Sequence[Sequence[int]]) -> None:
        self._engine, self._asked, self._expected = engine, asked, expected
        self._outputs: list[list[int]] = [[] for _ in asked]
        self._rounds = [0] * len(asked)
        self.tally = Tally()
        self.times: list[float] = []  # when tokens came (time.monotonic), of any stream
        for stream in range(len(asked)):
            self._submit(stream)

    def step(self) -> None:
        """One step of the engine; raises what it raises."""
        chunks = self._engine.step()
        now = time.monotonic()
        if any(chunk.token_ids for chunk in chunks):
            self.times.append(now)
        for chunk in chunks:
            self._take(int(chunk.request_id.partition("-")[0]), chunk)

    def longest_gap(self, since: float) -> float:
        """Seconds without a token for anybody, from the last one before `since` on."""
        before = [t for t in self.times if t <= since][-1:]
        times = [*before, *(t for t in self.times if t > since)]
        return max((b - a for a, b in zip(times[:-1], times[1:], strict=True)), default=0.0)

    def _submit(self, stream: int) -> None:
        request = replace(self._asked[stream], request_id=f"{stream}-{self._rounds[stream]}")
        self._outputs[stream] = []
        self._engine.submit(request)

    def _take(self, stream: int, chunk: TokenChunk) -> None:
        self._outputs[stream] += chunk.token_ids
        if chunk.finish_reason is None:
            return
        tally = self.tally
        tally.num_finished += 1
        tally.num_restarted += chunk.stats is not None and chunk.stats.num_restarts > 0
        if chunk.finish_reason is FinishReason.ERROR:
            tally.errors.append(f"{chunk.request_id}: {chunk.error}")
        else:
            self._compare(stream, chunk.request_id)
        self._rounds[stream] += 1
        self._submit(stream)

    def _compare(self, stream: int, name: str) -> None:
        verdict = judge(self._outputs[stream], self._expected[stream])
        self.tally.num_lost_tokens += verdict.num_lost
        self.tally.num_repeated_tokens += verdict.num_repeated
        if verdict.differs_at is not None:
            self.tally.differences.append(f"{name} at token {verdict.differs_at}")
