"""Acceptance of drafts on processed logits, in plain PyTorch: the CPU path, and the oracle of every faster one.

Greedy rows compare with the arg-max. Coupled rows draw target and draft with the same noise and compare, so that their
ids are those of plain seeded decoding. Ratio rows follow Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", 2023: accept with probability min(1, p/q), else draw from max(p - q, 0).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp.noise import Purpose, gumbel, uniform


class Method(enum.IntEnum):
    """How a row's tokens are chosen and its drafts judged."""

    GREEDY = 0
    COUPLED = 1
    RATIO = 2


@dataclass(frozen=True, kw_only=True)
class DrawKeys:
    """What keys each row's randomness. The two flags are the host's: False promises that no row has that method."""

    method: Tensor  # [R] int64, a Method
    seeds: Tensor  # [R] int64
    choices: Tensor  # [R] int64
    any_coupled: bool
    any_ratio: bool

    @property
    def any_sampled(self) -> bool:
        return self.any_coupled or self.any_ratio


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """`next_token` follows the last accepted draft. A `bad` row's other two values mean nothing, but are in range."""

    num_accepted: Tensor  # [R] int64, 0..k
    next_token: Tensor  # [R] int64
    bad: Tensor  # [R] bool: NaN, infinite or no logits, or a draft that is no token, at a position that counts


def draw(logits: Tensor, keys: DrawKeys, positions: Tensor, *, draft: bool) -> Tensor:
    """One token for each row from processed logits [R, V] for absolute `positions` [R]: [R] int64.

    `draft` says that the tokens are drafts: those of ratio rows are then drawn apart from the target's noise. Greedy
    rows, and rows of equal scores, take the lowest of the best ids.
    """
    if not keys.any_sampled:
        return logits.argmax(-1)
    purpose: Purpose | Tensor = Purpose.TARGET
    if draft and keys.any_ratio:
        purpose = torch.where(keys.method == Method.RATIO, int(Purpose.DRAFT), int(Purpose.TARGET))
    noise = gumbel(keys.seeds, keys.choices, positions, purpose, logits.shape[-1])
    return noise.mul_((keys.method != Method.GREEDY).unsqueeze(1)).add_(logits).argmax(-1)


def accept(
    logits: Tensor,
    drafts: Tensor,
    draft_logits: Tensor | None,
    keys: DrawKeys,
    first_position: Tensor,
    max_accept: Tensor,
) -> Acceptance:
    """Judges the drafts of R rows; no row can change another's result.

    logits: processed target logits [R, 1 + k, V]; row j judges draft j + 1, the last one follows all drafts.
    drafts: [R, k] int64. draft_logits: processed logits [R, k, V] that the drafts of ratio rows were drawn from; None
    when no row has that method. first_position: [R] int64, absolute position of the first draft. max_accept: [R] int64;
    drafts beyond it are not looked at, and the token in the place of the first of them is drawn from p itself.
    """
    num_drafts, vocab_size = drafts.shape[1], logits.shape[2]
    assert logits.shape[1] == num_drafts + 1
    steps = torch.arange(num_drafts + 1, device=logits.device)
    examined = steps[:-1] < max_accept.unsqueeze(1)  # [R, k]
    is_token = (drafts >= 0) & (drafts < vocab_size)  # [R, k]
    target = _target_tokens(logits, keys, first_position)  # [R, 1 + k]
    passed = drafts == target[:, :-1]
    ratio = keys.method == Method.RATIO
    if keys.any_ratio and num_drafts:
        assert draft_logits is not None, "ratio rows need the logits their drafts were drawn from"
        safe_drafts = drafts.clamp(0, vocab_size - 1)
        ratio_passed = _ratio_test(logits[:, :-1], safe_drafts, draft_logits, keys, first_position)
        passed = torch.where(ratio.unsqueeze(1), ratio_passed, passed)
    num_accepted = (passed & is_token & examined).long().cumprod(1).sum(1)  # [R]

    next_token = target.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    healthy = logits.gather(2, target.unsqueeze(2)).squeeze(2).isfinite()  # [R, 1 + k]: arg-max finds any NaN
    counts = steps <= num_accepted.unsqueeze(1)  # [R, 1 + k]
    bad = (counts & ~healthy).any(1) | (counts[:, :-1] & examined & ~is_token).any(1)
    if keys.any_ratio:
        rejected = num_accepted < max_accept.clamp(max=num_drafts)
        ratio_next = _ratio_next(logits, draft_logits, keys, first_position, num_accepted, rejected)
        next_token = torch.where(ratio, ratio_next, next_token)
    if keys.any_ratio and num_drafts:
        assert draft_logits is not None
        lost = counts[:, :-1] & examined & ~draft_logits.amax(-1).isfinite()
        bad = bad | (ratio & lost.any(1))
    return Acceptance(num_accepted=num_accepted, next_token=next_token, bad=bad)


def _target_tokens(logits: Tensor, keys: DrawKeys, first_position: Tensor) -> Tensor:
    """The target's own choice at each position, [R, 1 + k]; of ratio rows (and greedy ones) the arg-max."""
    if not keys.any_coupled:
        return logits.argmax(-1)
    num_rows, q_len, vocab_size = logits.shape
    positions = first_position.unsqueeze(1) + torch.arange(q_len, device=logits.device)  # [R, 1 + k]
    seeds, choices = (_for_each_position(key, q_len) for key in (keys.seeds, keys.choices))
    noise = gumbel(seeds, choices, positions.flatten(), Purpose.TARGET, vocab_size).view(num_rows, q_len, vocab_size)
    return noise.mul_((keys.method == Method.COUPLED).view(-1, 1, 1)).add_(logits).argmax(-1)


def _for_each_position(key: Tensor, count: int) -> Tensor:
    """[R] -> [R * count], each entry `count` times (repeat_interleave takes 0.3 ms on the CPU)."""
    return key.unsqueeze(1).expand(-1, count).reshape(-1)


def _ratio_test(logits: Tensor, drafts: Tensor, draft_logits: Tensor, keys: DrawKeys, first_position: Tensor) -> Tensor:
    """Whether u < p/q at each draft, [R, k] bool. `logits` and `draft_logits` are [R, k, V]."""
    num_rows, num_drafts = drafts.shape
    positions = first_position.unsqueeze(1) + torch.arange(num_drafts, device=drafts.device)
    seeds, choices = (_for_each_position(key, num_drafts) for key in (keys.seeds, keys.choices))
    u = uniform(seeds, choices, positions.flatten(), Purpose.ACCEPT, 1).view(num_rows, num_drafts)
    p, q = (_probability(scores, drafts).double() for scores in (logits, draft_logits))
    return u * q < p


def _probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """softmax(logits [R, k, V]) at tokens [R, k], without the other tokens' exponentials."""
    return (logits.gather(2, tokens.unsqueeze(2)).squeeze(2) - logits.logsumexp(-1)).exp()


def _ratio_next(
    logits: Tensor,
    draft_logits: Tensor | None,
    keys: DrawKeys,
    first_position: Tensor,
    num_accepted: Tensor,
    rejected: Tensor,
) -> Tensor:
    """The recovered token where a draft was `rejected` [R], else one drawn from p; [R]."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    scores = logits[rows, num_accepted]  # [R, V]
    if draft_logits is not None and draft_logits.shape[1]:
        q_logits = draft_logits[rows, num_accepted.clamp(max=draft_logits.shape[1] - 1)]  # [R, V]
        residual = (scores.softmax(-1) - q_logits.softmax(-1)).clamp_min_(0.0)
        recover = rejected & (residual.amax(-1) > 0)
        scores = torch.where(recover.unsqueeze(1), residual.log_(), scores)
    purpose = torch.where(rejected, int(Purpose.RECOVER), int(Purpose.TARGET))
    noise = gumbel(keys.seeds, keys.choices, first_position + num_accepted, purpose, logits.shape[2])
    return noise.add_(scores).argmax(-1)
