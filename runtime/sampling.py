"""The logits pipeline: one order of operations for the target at every verified position and for every draft.

The order is vLLM's: logit bias, min tokens, penalties, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.sampling_tables import SamplingRows

_SORT_ABOVE = 256  # from this top-k on, sorting the vocabulary is no slower than finding the best


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Committed tokens of R rows, for penalties."""

    output: Tensor  # [R, V] int32
    in_prompt: Tensor  # [R, V] bool


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log-probabilities in nats of unprocessed logits; `top_*` best first."""

    chosen: Tensor  # [R, Q] float32
    top_ids: Tensor  # [R, Q, n] int64
    top: Tensor  # [R, Q, n] float32


def process(
    logits: Tensor,
    rows: SamplingRows,
    lengths: Tensor,
    drafts: Tensor | None = None,
    counts: TokenCounts | None = None,
    *,
    first: int = 0,
) -> Tensor:
    """Processed logits [R, Q, V], -inf where a token is removed; `logits` (float32 [R, Q, V]) stay as they are.

    lengths: [R] int64 committed tokens n. Position j of the Q chooses the token at n + first + j, after drafts
    1 .. first + j. drafts: [R, at least first + Q - 1] int64, may be None when none precedes. counts: needed when a row
    has penalties. A verify row has first = 0 and Q = 1 + k, the logits of draft i have first = i - 1 and Q = 1.

    When no row uses an option the result is `logits` itself. Ties: top-k and top-p keep every token that scores as much
    as the lowest one kept.
    """
    uses = rows.uses
    if uses.bias or uses.min_tokens or uses.penalties:
        logits = logits.clone()
    if uses.bias:
        _add_bias_(logits, rows)
    if uses.min_tokens:
        _mask_min_tokens_(logits, rows, lengths, first)
    if uses.penalties:
        assert counts is not None, "rows with penalties need token counts"
        _penalise_(logits, rows, counts, drafts, first)
    if uses.temperature:
        logits = logits / rows.temperature.view(-1, 1, 1)
    if uses.min_p:
        floor = logits.amax(-1, keepdim=True) + rows.min_p.log().view(-1, 1, 1)
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if uses.max_top_k or uses.top_p:
        logits = _top_k_top_p(logits, rows)
    return logits


def _add_bias_(logits: Tensor, rows: SamplingRows) -> None:
    ids = rows.bias_ids.clamp(min=0).unsqueeze(1).expand(-1, logits.shape[1], -1)  # [R, Q, B]; unused ones add 0
    logits.scatter_add_(2, ids, rows.bias_values.unsqueeze(1).expand_as(ids))


def _mask_min_tokens_(logits: Tensor, rows: SamplingRows, lengths: Tensor, first: int) -> None:
    """-inf for EOS and stop ids at positions where the output would be shorter than min_tokens."""
    q_len = logits.shape[1]
    output_len = (lengths - rows.prompt_len).unsqueeze(1) + torch.arange(first, first + q_len, device=logits.device)
    early = output_len < rows.min_tokens.unsqueeze(1)  # [R, Q]
    used = rows.masked_ids >= 0  # [R, M]
    fill = torch.where(early.unsqueeze(2) & used.unsqueeze(1), -torch.inf, 0.0)  # [R, Q, M]
    ids = rows.masked_ids.clamp(min=0).unsqueeze(1).expand_as(fill)
    logits.scatter_add_(2, ids, fill)


def _penalise_(logits: Tensor, rows: SamplingRows, counts: TokenCounts, drafts: Tensor | None, first: int) -> None:
    num_rows, q_len, vocab_size = logits.shape
    output = counts.output.unsqueeze(1).repeat(1, q_len, 1)  # [R, Q, V]
    for idx in range(first + q_len - 1):
        assert drafts is not None, "a position after drafts needs their ids"
        begin = max(0, idx + 1 - first)  # the first position that stands after this draft
        ids = drafts[:, idx].clamp(0, vocab_size - 1).view(-1, 1, 1).expand(-1, q_len - begin, 1)
        output[:, begin:].scatter_add_(2, ids, torch.ones_like(ids, dtype=output.dtype))
    repetition, presence, frequency = (
        penalty.view(-1, 1, 1) for penalty in (rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty)
    )
    in_output = output > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    torch.where(in_output | counts.in_prompt.unsqueeze(1), scaled, logits, out=logits)
    logits.sub_(frequency * output).sub_(presence * in_output)


def _top_k_top_p(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Removes what top-k, and then top-p over the rest, leave out."""
    uses = rows.uses
    best = _descending(logits, 0 if uses.top_p_alone else uses.max_top_k)  # [R, Q, num_best]
    if uses.max_top_k:
        logits = logits.masked_fill(logits < _top_k_floor(best, rows.top_k), -torch.inf)
    if not uses.top_p:
        return logits
    # Relative to what top-k left. Beyond that the mass passes 1, which changes nothing; where equals of the k-th token
    # are missing from `best` it falls short, and the k-th token is the last kept, as it should be.
    mass = (best - logits.logsumexp(-1, keepdim=True)).exp_().cumsum(-1)  # [R, Q, num_best]
    # A token stays while the tokens above it weigh less than top_p: the one that crosses the threshold is the last.
    top_p = rows.top_p.view(-1, 1, 1)
    num_kept = 1 + (mass[..., :-1] < top_p).sum(-1, keepdim=True)  # [R, Q, 1]
    floor = best.gather(2, num_kept - 1).masked_fill_(top_p >= 1, -torch.inf)
    return logits.masked_fill(logits < floor, -torch.inf)


def _descending(logits: Tensor, num_best: int) -> Tensor:
    """The best `num_best` logits in order (0: all), or all when that is no slower. NaN comes first."""
    if 0 < num_best <= min(_SORT_ABOVE, logits.shape[2]):
        return logits.topk(num_best, dim=2).values
    if logits.device.type == "cpu":  # numpy sorts with vector instructions, torch (2.13) does not: ten times as long
        return torch.from_numpy(np.sort(logits.numpy(), axis=2)).flip(2)
    return logits.sort(dim=2, descending=True).values


def _top_k_floor(best: Tensor, top_k: Tensor) -> Tensor:
    """The k-th best logit of each row, [R, Q, 1]; -inf for rows without top-k or with one beyond the vocabulary."""
    index = top_k.clamp(1, best.shape[2]).view(-1, 1, 1).sub(1).expand(-1, best.shape[1], 1)
    return best.gather(2, index).masked_fill_(top_k.view(-1, 1, 1) == 0, -torch.inf)


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> Logprobs:
    """Of unprocessed logits [R, Q, V]: the `chosen` tokens' [R, Q] and the `num_top` best tokens' log-probabilities."""
    total = logits.logsumexp(-1, keepdim=True)  # [R, Q, 1]
    top, top_ids = logits.topk(min(num_top, logits.shape[2]), dim=2)
    return Logprobs(chosen=(logits.gather(2, chosen.unsqueeze(2)) - total).squeeze(2), top_ids=top_ids, top=top - total)
