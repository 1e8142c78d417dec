"""What became of each prompt, and the figures over one or all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from launch.prompts import PromptRow
from runtime.request import FinishReason, RequestStats, TokenChunk, TokenLogprobs


@dataclass(kw_only=True)
class Outcome:
    """One prompt's output so far. `user_error`: the row itself was at fault, not the engine."""

    row: PromptRow
    num_prompt_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    user_error: bool = False
    stats: RequestStats | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def refuse(self, error: str) -> None:
        """End before the engine saw it: the prompt or its sampling fields are wrong."""
        self.finish_reason, self.error, self.user_error = FinishReason.ERROR, error, True

    def add(self, chunk: TokenChunk) -> None:
        """Take in what one step gave."""
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.finish_reason, self.stop_reason, self.stats = chunk.finish_reason, chunk.stop_reason, chunk.stats
        self.error = chunk.error

    def to_json(self) -> dict[str, Any]:
        """The object of one `--json` line; `stop_reason`, `logprobs` and `error` only where there is one."""
        line: dict[str, Any] = {
            "id": self.row.id,
            "prompt": self.row.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "stats": _request_figures(self),
        }
        if self.stop_reason is not None:
            line["stop_reason"] = self.stop_reason
        if self.logprobs:
            line["logprobs"] = [{"token_id": p.token_id, "logprob": p.logprob, "top": p.top} for p in self.logprobs]
        if self.error is not None:
            line["error"] = self.error
        return line


def summarise(outcomes: Sequence[Outcome], wall_s: float, load_s: float) -> dict[str, Any]:
    """The same figures over all prompts. `tokens_per_s` is over the wall time of the run, `ttft_ms` a mean."""
    num_tokens = sum(len(o.token_ids) for o in outcomes)
    stats = [o.stats for o in outcomes if o.stats is not None]
    ttfts = [s.ttft_s for s in stats if s.ttft_s is not None]
    return {
        "num_prompts": len(outcomes),
        "num_errors": sum(o.finish_reason is FinishReason.ERROR for o in outcomes),
        "num_prompt_tokens": sum(o.num_prompt_tokens for o in outcomes),
        "num_tokens": num_tokens,
        **_speculation(stats, num_tokens - sum(bool(o.token_ids) for o in outcomes)),
        "acceptance_per_position": acceptance_per_position(stats),
        "ttft_ms": round(1000 * sum(ttfts) / len(ttfts), 3) if ttfts else None,
        "tokens_per_s": round(num_tokens / wall_s, 2) if num_tokens and wall_s > 0 else None,
        "wall_s": round(wall_s, 3),
        "load_s": round(load_s, 3),
    }


def acceptance_per_position(stats: Iterable[RequestStats]) -> list[float]:
    """Share of verify steps that accepted the first, second, ... draft, among those with room for that many."""
    listed = list(stats)
    drafted = _sums(s.drafted_per_position for s in listed)
    accepted = _sums(s.accepted_per_position for s in listed)
    return [round(a / d, 4) for a, d in zip(accepted, drafted, strict=True) if d]


def _sums(rows: Iterable[tuple[int, ...]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _request_figures(outcome: Outcome) -> dict[str, Any]:
    stats = outcome.stats
    num_tokens = len(outcome.token_ids)
    e2e_s = stats.e2e_s if stats else None
    ttft_s = stats.ttft_s if stats else None
    return {
        **_speculation([stats] if stats else [], num_tokens - 1),
        "ttft_ms": None if ttft_s is None else round(1000 * ttft_s, 3),
        "tokens_per_s": round(num_tokens / e2e_s, 2) if e2e_s and num_tokens else None,
    }


def _speculation(stats: Sequence[RequestStats], num_verified: int) -> dict[str, Any]:
    """Steps are verify steps: they yield all tokens but each request's first, which comes from its prompt's pass."""
    steps = sum(s.steps for s in stats)
    drafted = sum(s.drafted for s in stats)
    accepted = sum(s.accepted for s in stats)
    return {
        "steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "tokens_per_step": round(num_verified / steps, 4) if steps else None,
    }
