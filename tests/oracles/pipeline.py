"""The logits pipeline for one position in float64 numpy: slow, and written from the rules alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.request import SamplingParams

Row = NDArray[np.float64]


def processed_row(
    logits: Row, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos_token_ids: Sequence[int] = ()
) -> Row:
    """Logits [V] for the token after `prompt` and `output`, -inf where it cannot be."""
    scores = np.array(logits, dtype=np.float64)
    for token_id, value in params.logit_bias.items():
        scores[token_id] += value
    if len(output) < params.min_tokens:
        for token_id in {*eos_token_ids, *params.stop_token_ids}:
            scores[token_id] = -np.inf
    for token_id in {*prompt, *output}:
        positive = scores[token_id] > 0
        scores[token_id] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
    for token_id in set(output):
        scores[token_id] -= params.frequency_penalty * list(output).count(token_id) + params.presence_penalty
    if params.temperature < 1e-5:
        return scores
    scores /= params.temperature
    if params.min_p:
        scores[softmax(scores) < params.min_p * softmax(scores).max() * (1 - 1e-7)] = -np.inf
    if params.top_k:
        scores[scores < np.sort(scores)[-min(params.top_k, len(scores))]] = -np.inf
    if params.top_p < 1:
        p = softmax(scores)
        kept = [p[scores > score].sum() < params.top_p for score in scores]
        scores[~np.array(kept)] = -np.inf
    return scores


def softmax(scores: Row) -> Row:
    weights = np.exp(scores - scores.max())
    result: Row = weights / weights.sum()
    return result
