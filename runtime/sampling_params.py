"""The sampling parameters of a request as the bytes a plan carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp.accept import Method
from runtime.request import SamplingParams

GREEDY_BELOW = 1e-5  # a temperature below this is greedy: the quotient would leave float32
NO_CAP = 2**31 - 1

PARAM_DTYPE = np.dtype(
    [
        ("seed", "<i8"),
        ("temperature", "<f4"),  # 1 for greedy rows
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("top_k", "<i4"),  # 0: off
        ("min_tokens", "<i4"),
        ("prompt_len", "<i4"),
        ("choice", "<i4"),
        ("method", "<i4"),  # mtp.accept.Method
        ("max_drafts", "<i4"),  # most drafts accepted a step; NO_CAP: no limit of its own
        ("num_logprobs", "<i4"),  # -1: none
        ("num_bias", "<i4"),  # entries of this row in bias_ids and bias_values
        ("num_masked", "<i4"),  # entries of this row in masked_ids
    ]
)

NEUTRAL = np.array([(0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, Method.GREEDY, NO_CAP, -1, 0, 0)], dtype=PARAM_DTYPE)


@dataclass(frozen=True, kw_only=True)
class EncodedParams:
    """Parameters of n requests: fixed-size rows, and the ragged parts of all rows one after the other."""

    rows: NDArray[Any]  # [n] PARAM_DTYPE
    bias_ids: NDArray[np.int64]  # [rows.num_bias.sum()]
    bias_values: NDArray[np.float32]  # like bias_ids
    masked_ids: NDArray[np.int64]  # [rows.num_masked.sum()]: not drawn before min_tokens


def encode_params(
    params: SamplingParams, *, prompt_len: int, default_seed: int, eos_token_ids: Sequence[int]
) -> EncodedParams:
    """One request's parameters. `default_seed` (int64) stands in for a missing seed.

    Greedy rows (temperature 0, or below 1e-5) get no top-k, top-p or min-p: none of them removes the arg-max.
    """
    sampled = params.temperature >= GREEDY_BELOW
    masked = sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens else []
    row = NEUTRAL.copy()
    row["seed"] = default_seed if params.seed is None else params.seed
    row["repetition_penalty"] = params.repetition_penalty
    row["presence_penalty"] = params.presence_penalty
    row["frequency_penalty"] = params.frequency_penalty
    row["min_tokens"] = min(params.min_tokens, NO_CAP)
    row["prompt_len"] = prompt_len
    row["choice"] = params.choice
    row["max_drafts"] = NO_CAP if params.draft_tokens is None else min(params.draft_tokens, NO_CAP)
    row["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
    row["num_bias"] = len(params.logit_bias)
    row["num_masked"] = len(masked)
    if sampled:
        row["method"] = Method.COUPLED if params.coupled else Method.RATIO
        row["temperature"] = params.temperature
        row["top_p"] = params.top_p
        row["min_p"] = params.min_p
        row["top_k"] = min(params.top_k, NO_CAP)
    return EncodedParams(
        rows=row,
        bias_ids=np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias)),
        bias_values=np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)),
        masked_ids=np.array(masked, dtype=np.int64),
    )


def stack_params(parts: Sequence[EncodedParams]) -> EncodedParams:
    """Several requests' parameters as one; an empty sequence gives n = 0."""
    return EncodedParams(
        rows=np.concatenate([NEUTRAL[:0], *(part.rows for part in parts)]),
        bias_ids=np.concatenate([np.empty(0, np.int64), *(part.bias_ids for part in parts)]),
        bias_values=np.concatenate([np.empty(0, np.float32), *(part.bias_values for part in parts)]),
        masked_ids=np.concatenate([np.empty(0, np.int64), *(part.masked_ids for part in parts)]),
    )


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError when a token id of `params` is not one of the model's, or more are asked for than it has."""
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ValueError(f"logprobs = {params.logprobs}: the vocabulary has {vocab_size} tokens")
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name} has token id {token_id}: expected 0..{vocab_size - 1}")
