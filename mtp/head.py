"""The multi-token-prediction head of DeepSeek-V3 (arXiv:2412.19437, section 2.2): drafts from the target's states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from parallel.group import Group
from parallel.halves import gather_halves, scatter_sums, split_tokens
from parallel.linear import Linear
from parallel.norm import RmsNorm
from parallel.tokens import local_slice


class Pass(Protocol):
    """What places a half's tokens; the head reads their number only."""

    @property
    def num_tokens(self) -> int: ...


Meta_contra = TypeVar("Meta_contra", bound=Pass, contravariant=True)


class Embed(Protocol):
    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size] float32: this rank's part of the sum over tp."""


class Block(Protocol[Meta_contra]):
    """A decoder layer of the target's family; it keeps its own part of the pages."""

    def __call__(self, hidden: list[Tensor], metas: Sequence[Meta_contra], kv: list[Tensor]) -> list[Tensor]:
        """Per half this rank's [ceil(num_tokens / tp), hidden_size] -> the same; `hidden` may be overwritten."""


class MtpHead(Generic[Meta_contra]):
    """`shared_head.norm(block(eh_proj([enorm(embed(x_{i+1})), hnorm(H_i)])))`.

    `embed` and `output` are the target's own unless the checkpoint holds different ones; like those of the target they
    are split by vocabulary over `tp`, and everything between them works on each rank's share of the tokens.
    """

    def __init__(
        self,
        *,
        tp: Group,
        embed: Embed,
        embed_norm: RmsNorm,
        hidden_norm: RmsNorm,
        input_proj: Linear,
        block: Block[Meta_contra],
        final_norm: RmsNorm,
        output: Linear,
    ) -> None:
        self._tp = tp
        self._embed, self._embed_norm, self._hidden_norm = embed, embed_norm, hidden_norm
        self._input_proj, self._block, self._final_norm, self._output = input_proj, block, final_norm, output

    def forward(self, token_ids: Tensor, hidden: Tensor, metas: Sequence[Meta_contra], kv: list[Tensor]) -> Tensor:
        """The head's states, which are also its input in recursive passes.

        token_ids: [num_tokens] int64, x_{i+1} for position i of the one or two `metas`; hidden: [num_tokens,
        hidden_size], the target's H_i after its final norm or this head's own states; kv: per layer, as in the target.
        Returns [num_tokens, hidden_size] after `shared_head.norm`, whole on every rank of tp.
        """
        sizes = [meta.num_tokens for meta in metas]
        embedded = scatter_sums(self._tp, [self._embed(ids) for ids in split_tokens(token_ids, sizes)])
        states = [local_slice(self._tp, half) for half in split_tokens(hidden, sizes)]
        inputs = [self._joined(*half) for half in zip(embedded, states, strict=True)]
        outputs = self._block(inputs, metas, kv)
        return gather_halves(self._tp, [self._final_norm(half) for half in outputs], sizes)

    def logits(self, states: Tensor) -> Tensor:
        """[n, hidden_size] from `forward` -> [n, vocab_size / tp] float32: this rank's words."""
        return self._output(states)

    def _joined(self, embedded: Tensor, states: Tensor) -> Tensor:
        """[n, hidden_size] both -> the block's input."""
        return self._input_proj(torch.cat((self._embed_norm(embedded), self._hidden_norm(states)), 1))
