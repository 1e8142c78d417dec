"""What a user asks for, what streams back, and the request's life in between."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300


class FinishReason(enum.StrEnum):
    """Why a request ended. `STOP` covers EOS, stop ids and stop strings; `LENGTH` both length limits."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Everything that shapes the distribution a request draws from, and where its output ends.

    `seed=None` draws by the ratio form of acceptance, a seed by the coupled form (docs/one-step.md); `acceptance`
    overrides that choice. `max_tokens=None` runs to the context limit.
    Raises ValueError naming the field, the value and the range.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int | None = 128
    seed: int | None = None
    choice: int = 0
    acceptance: str | None = None  # None | "coupled" | "ratio"
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: the chosen token and the n best
    draft_tokens: int | None = None  # at most this many accepted drafts a step; None: the deployment's k

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected {want}")

        def finite(name: str) -> bool:
            return math.isfinite(getattr(self, name))

        for name in ("top_k", "min_tokens", "choice"):
            check(_is_integer(getattr(self, name)), name, "an integer")
        for name in ("max_tokens", "seed", "logprobs", "draft_tokens"):
            check(getattr(self, name) is None or _is_integer(getattr(self, name)), name, "an integer or None")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            check(_is_number(getattr(self, name)), name, "a number")
        check(finite("temperature") and self.temperature >= 0, "temperature", "a finite number >= 0")
        check(self.top_k >= 0, "top_k", "an integer >= 0 (0 turns it off)")
        check(0 < self.top_p <= 1, "top_p", "a number in (0, 1]")
        check(0 <= self.min_p <= 1, "min_p", "a number in [0, 1]")
        check(finite("repetition_penalty") and self.repetition_penalty > 0, "repetition_penalty", "a finite number > 0")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "a number in [-2, 2]")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "a number in [-2, 2]")
        check(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        check(all(_is_integer(token) for token in self.logit_bias), "logit_bias", "token ids as keys")
        check(
            all(_is_number(b) and -100 <= b <= 100 for b in self.logit_bias.values()),
            "logit_bias", "values in [-100, 100]",
        )
        check(self.min_tokens >= 0, "min_tokens", "an integer >= 0")
        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "an integer >= 1")
        check(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        check(0 <= self.choice < 2**16, "choice", "an integer in [0, 65536)")
        check(self.acceptance in (None, "coupled", "ratio"), "acceptance", '"coupled" or "ratio"')
        check(not isinstance(self.stop, str), "stop", "a tuple of strings")
        check(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings")
        check(all(_is_integer(token) for token in self.stop_token_ids), "stop_token_ids", "integers")
        check(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"0..{MAX_LOGPROBS}")
        check(self.draft_tokens is None or self.draft_tokens >= 0, "draft_tokens", "an integer >= 0")

    @property
    def uses_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def coupled(self) -> bool:
        """Whether tokens are drawn with noise keyed by (seed, choice, position, token)."""
        return self.acceptance == "coupled" or (self.acceptance is None and self.seed is not None)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt to continue: `prompt_token_ids` already carries BOS and the like."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities (nats, of the target's unprocessed logits) at one output position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """Counters of one request; times in seconds since the request was submitted."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    steps: int = 0  # verify steps: each committed 1 + accepted tokens
    drafted: int = 0
    accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()  # of the first, second, ... draft of a row; sums to `drafted`
    accepted_per_position: tuple[int, ...] = ()
    num_preemptions: int = 0
    num_restarts: int = 0  # how often the ranks were lost while it ran
    ttft_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class TokenChunk:
    """What one step adds to a request. The last chunk of a request has a `finish_reason` and `stats`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    error: str | None = None
    stats: RequestStats | None = None

    def with_stats(self, stats: RequestStats) -> TokenChunk:
        return replace(self, stats=stats)
