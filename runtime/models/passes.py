"""From a half's metadata to what its way through the layers starts with, on one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.group import Group
from parallel.tokens import num_local_tokens
from runtime.attention.meta import AttentionMeta
from runtime.attention.mla_pass import prepare_pass
from runtime.models.decoder import HalfState


class Passes:
    """rotations: [max_position_embeddings, qk_rope_head_dim / 2] complex64; num_heads: of this rank."""

    def __init__(self, rotations: Tensor, num_heads: int, tp: Group) -> None:
        self._rotations, self._num_heads, self._tp = rotations, num_heads, tp

    @property
    def device(self) -> torch.device:
        return self._rotations.device

    def begin(self, hidden: list[Tensor], metas: Sequence[AttentionMeta], kv: list[Tensor]) -> list[HalfState]:
        """hidden: per half this rank's [ceil(num_tokens / tp), hidden_size], which the layers overwrite."""
        return [self._half(local, meta, kv) for local, meta in zip(hidden, metas, strict=True)]

    def _half(self, hidden: Tensor, meta: AttentionMeta, kv: list[Tensor]) -> HalfState:
        prepared = prepare_pass(meta, self._rotations, self._num_heads)
        capacity = None if meta.capacity is None else num_local_tokens(self._tp, meta.capacity)
        dummy = local_dummy(meta, self._tp)
        return HalfState(hidden, meta.num_tokens, prepared, kv, dummy, capacity=capacity)


def local_dummy(meta: AttentionMeta, tp: Group) -> Tensor | None:
    """[ceil(num_tokens / tp)] bool: this rank's tokens that no expert sees, padding included; None: there are none."""
    if tp.size == 1:
        return meta.dummy
    num_rows = tp.size * num_local_tokens(tp, meta.num_tokens)
    if num_rows == meta.num_tokens and meta.dummy is None:
        return None
    dummy = torch.ones(num_rows, dtype=torch.bool, device=meta.write_index.device)
    dummy[: meta.num_tokens] = False if meta.dummy is None else meta.dummy
    return dummy.chunk(tp.size)[tp.rank]
