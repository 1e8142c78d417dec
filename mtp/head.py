"""The multi-token-prediction head of DeepSeek-V3 (arXiv:2412.19437, section 2.2): drafts from the target's states."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from parallel.linear import Linear
from parallel.norm import RmsNorm

Meta_contra = TypeVar("Meta_contra", contravariant=True)


class Embed(Protocol):
    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size] float32."""


class Block(Protocol[Meta_contra]):
    """A decoder layer of the target's family; it keeps its own part of the pages."""

    def __call__(self, hidden: Tensor, meta: Meta_contra, kv: list[Tensor]) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape; `hidden` may be overwritten."""


class MtpHead(Generic[Meta_contra]):
    """`shared_head.norm(block(eh_proj([enorm(embed(x_{i+1})), hnorm(H_i)])))`.

    `embed` and `output` are the target's own unless the checkpoint holds different ones.
    """

    def __init__(
        self,
        *,
        embed: Embed,
        embed_norm: RmsNorm,
        hidden_norm: RmsNorm,
        input_proj: Linear,
        block: Block[Meta_contra],
        final_norm: RmsNorm,
        output: Linear,
    ) -> None:
        self._embed, self._embed_norm, self._hidden_norm = embed, embed_norm, hidden_norm
        self._input_proj, self._block, self._final_norm, self._output = input_proj, block, final_norm, output

    def forward(self, token_ids: Tensor, hidden: Tensor, meta: Meta_contra, kv: list[Tensor]) -> Tensor:
        """The head's states, which are also its input in recursive passes.

        token_ids: [num_tokens] int64, x_{i+1} for position i of `meta`; hidden: [num_tokens, hidden_size], the
        target's H_i after its final norm or this head's own states; kv: per layer, as in the target.
        Returns [num_tokens, hidden_size] after `shared_head.norm`.
        """
        both = torch.cat((self._embed_norm(self._embed(token_ids)), self._hidden_norm(hidden)), 1)
        return self._final_norm(self._block(self._input_proj(both), meta, kv))

    def logits(self, states: Tensor) -> Tensor:
        """[n, hidden_size] from `forward` -> [n, vocab_size] float32."""
        return self._output(states)
