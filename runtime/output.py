"""From committed tokens to chunks: stops in token order, text, logprobs, counters of one request."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from runtime.plan import StepResult
from runtime.request import FinishReason, GenerateRequest, RequestStats, TokenChunk, TokenLogprobs
from runtime.scheduler import CommittedRow
from runtime.serve.detokenizer import OutputText


class OutputState:
    """What one request has put out. Ids, text, logprobs and counts are cut at the same token: the first stop wins."""

    def __init__(
        self, request: GenerateRequest, *, limit: int, eos_token_ids: Sequence[int], text: OutputText | None, k: int
    ) -> None:
        self.request = request
        sampling = request.sampling
        self._max_output = limit - len(request.prompt_token_ids)
        self._eos = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._text = text
        self._submitted = time.perf_counter()
        self._ttft_s: float | None = None
        self._num_output = self._steps = self._drafted = self._accepted = 0
        self._drafted_per_position, self._accepted_per_position = [0] * k, [0] * k

    def extend(self, row: CommittedRow, result: StepResult) -> TokenChunk:
        """The chunk for one committed row; it ends the request if it has a finish reason."""
        self._count(row)
        kept, pieces = 0, []
        reason: FinishReason | None = None
        stop: int | str | None = None
        for token_id in row.token_ids:
            kept += 1
            self._num_output += 1
            piece, stop = self._push(token_id)
            pieces.append(piece)
            if stop is not None:
                reason = FinishReason.STOP
            elif self._num_output >= self._max_output:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        if reason is not None and self._text is not None:
            pieces.append(self._text.finish())
        is_eos = reason is FinishReason.STOP and stop in self._eos and stop not in self._stop_ids
        return TokenChunk(
            request_id=self.request.request_id, token_ids=tuple(row.token_ids[:kept]), text="".join(pieces),
            logprobs=self._logprobs(row, result, kept), finish_reason=reason, stop_reason=None if is_eos else stop,
        )

    def fail(self, reason: FinishReason, error: str | None) -> TokenChunk:
        """The last chunk of a request that ends without a token of its own."""
        text = self._text.finish() if self._text is not None else ""
        return TokenChunk(request_id=self.request.request_id, text=text, finish_reason=reason, error=error)

    def stats(self, *, num_cached_tokens: int, num_preemptions: int, num_restarts: int) -> RequestStats:
        return RequestStats(
            num_prompt_tokens=len(self.request.prompt_token_ids), num_cached_tokens=num_cached_tokens,
            num_output_tokens=self._num_output, steps=self._steps, drafted=self._drafted, accepted=self._accepted,
            drafted_per_position=tuple(self._drafted_per_position),
            accepted_per_position=tuple(self._accepted_per_position), num_preemptions=num_preemptions,
            num_restarts=num_restarts, ttft_s=self._ttft_s, e2e_s=time.perf_counter() - self._submitted,
        )

    def _push(self, token_id: int) -> tuple[str, int | str | None]:
        """Text of one token, and the EOS, stop id or stop string that it ends the request with."""
        may_stop = self._num_output > self.request.sampling.min_tokens
        if may_stop and (token_id in self._eos or token_id in self._stop_ids):
            return "", token_id
        return self._text.push(token_id) if self._text is not None else ("", None)

    def _count(self, row: CommittedRow) -> None:
        if self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._submitted
        if row.verified:
            accepted = len(row.token_ids) - 1
            self._steps += 1
            self._drafted += row.drafted
            self._accepted += accepted
            for position in range(row.drafted):
                self._drafted_per_position[position] += 1
            for position in range(accepted):
                self._accepted_per_position[position] += 1

    def _logprobs(self, row: CommittedRow, result: StepResult, kept: int) -> tuple[TokenLogprobs, ...]:
        wanted = self.request.sampling.logprobs
        if wanted is None:
            return ()
        assert result.chosen_logprobs is not None
        assert result.top_ids is not None
        assert result.top_logprobs is not None
        chosen = result.chosen_logprobs[row.row, :kept].tolist()
        ids, values = (np.asarray(a[row.row, :kept, :wanted]) for a in (result.top_ids, result.top_logprobs))
        return tuple(
            TokenLogprobs(token_id=token, logprob=logprob, top=tuple(zip(i.tolist(), v.tolist(), strict=True)))
            for token, logprob, i, v in zip(row.token_ids[:kept], chosen, ids, values, strict=True)
        )
