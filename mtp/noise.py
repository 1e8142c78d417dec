"""Counter-based randomness: the same noise for the same key on every device, in every batch, after every preemption.

The generator is Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). The key is the
request's seed; the counter is (block, position, purpose and choice, 0). Integer words are identical everywhere; the
logarithms of `gumbel` agree across devices within float rounding.
"""

from __future__ import annotations

import enum

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORDS = 4  # 32-bit words in a block
_CHOICE_BITS = 16
_CPU_CHUNK = 1 << 16  # blocks worked on at a time, so that the six buffers of a CPU run stay in its cache


class Purpose(enum.IntEnum):
    """What a random number decides. Each (seed, choice, position, purpose) is used for one decision only."""

    TARGET = 0  # coupled draws of target and drafter; every draw from p itself
    DRAFT = 1  # drafts of the ratio form
    ACCEPT = 2  # the u of the ratio test
    RECOVER = 3  # the token that replaces a rejected draft


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Ten rounds on int64 tensors that hold 32-bit words; all broadcast against each other.

    Returns the block's four words, each in [0, 2^32). A product of two words wraps in int64, but keeps its bits.
    """
    shape = np.broadcast_shapes(*(word.shape for word in counter), *(word.shape for word in key))
    c0, c1, c2, c3 = (word.expand(shape).clone() for word in counter)
    high0, high1 = torch.empty_like(c0), torch.empty_like(c0)
    k0, k1 = key
    for _ in range(_ROUNDS):
        torch.mul(c0, _MULTIPLIERS[0], out=high0)
        torch.mul(c2, _MULTIPLIERS[1], out=high1)
        # c1 and c3 keep their product's upper bits: they are only ever xor-ed into words that are masked afterwards.
        torch.bitwise_right_shift(high1, 32, out=c0)
        c0.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(high0, 32, out=c2)
        c2.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, high1 = high1, c1
        c3, high0 = high0, c3
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)]


def uniform(seeds: Tensor, choices: Tensor, positions: Tensor, purpose: Purpose | Tensor, num: int) -> Tensor:
    """`num` numbers for each row, [N, num] float64 inside (0, 1), of 52 random bits each.

    `seeds`, `choices` (< 2^16) and `positions` (< 2^32) are int64 [N]; `purpose` is one for all rows or int64 [N].
    """
    words = _words(seeds, choices, positions, purpose, 0, (num + 1) // 2)
    pairs = (words[0] << 20 | words[1] >> 12, words[2] << 20 | words[3] >> 12)  # two of [N, blocks]
    bits = torch.stack(pairs, dim=-1).flatten(1)[:, :num]  # [N, num]
    return (bits.double() + 0.5) * 2.0**-52


def gumbel(
    seeds: Tensor,
    choices: Tensor,
    positions: Tensor,
    purpose: Purpose | Tensor,
    vocab_size: int,
    *,
    first_token: int = 0,
) -> Tensor:
    """Standard Gumbel noise for tokens `first_token .. first_token + vocab_size - 1`, [N, vocab_size] float32, finite.

    Arguments as in `uniform`. The noise of a token does not depend on the shard of the vocabulary it is drawn for.
    """
    num_rows = seeds.shape[0]
    first_block = first_token // _WORDS
    num_blocks = (first_token + vocab_size + _WORDS - 1) // _WORDS - first_block
    out = torch.empty((num_rows, num_blocks * _WORDS), dtype=torch.float32, device=seeds.device)
    step = max(1, _CPU_CHUNK // max(1, num_blocks)) if seeds.device.type == "cpu" else max(1, num_rows)
    for begin in range(0, num_rows, step):
        rows = slice(begin, begin + step)
        row_purpose = purpose[rows] if isinstance(purpose, Tensor) else purpose
        words = _words(seeds[rows], choices[rows], positions[rows], row_purpose, first_block, num_blocks)
        _gumbel_into(out[rows], words)
    skip = first_token - first_block * _WORDS
    return out[:, skip : skip + vocab_size]  # [N, vocab_size]


def _gumbel_into(out: Tensor, words: list[Tensor]) -> None:
    """-log(-log(1 - v)) with v = (word mod 2^31 + 1/2) / 2^31 for four words [N, blocks], interleaved in [N, 4 blocks].

    A winning token has large noise, that is a small v, where float32 is dense; the other end is clamped to stay finite.
    Pairs of words travel as one int64: copying with a stride and converting at once takes longer. `words` are consumed.
    """
    low, high = words[1].bitwise_left_shift_(32), words[3].bitwise_left_shift_(32)
    pairs = torch.stack((low.bitwise_or_(words[0]), high.bitwise_or_(words[2])), dim=2)  # [N, blocks, 2]
    out.copy_(pairs.view(torch.int32).flatten(1).bitwise_and_(0x7FFFFFFF))
    out.add_(0.5).mul_(-(2.0**-31)).clamp_min_(-(1.0 - 2.0**-24))
    out.log1p_().neg_().log_().neg_()


def _words(
    seeds: Tensor, choices: Tensor, positions: Tensor, purpose: Purpose | Tensor, first_block: int, num_blocks: int
) -> list[Tensor]:
    """Four words for each row and block, each [N, num_blocks]."""
    block = torch.arange(first_block, first_block + num_blocks, device=seeds.device)
    which = (choices + (purpose << _CHOICE_BITS)).unsqueeze(1)  # [N, 1]
    key = ((seeds & _MASK).unsqueeze(1), ((seeds >> 32) & _MASK).unsqueeze(1))
    return philox((block, positions.unsqueeze(1), which, torch.zeros_like(which)), key)
