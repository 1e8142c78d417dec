"""What all layers of one pass share: rotations, masks and page lists, worked out once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from runtime.attention.meta import AttentionMeta, PrefillRow


@dataclass(frozen=True, slots=True)
class DecodePass:
    num_rows: int
    num_tokens: int
    pages: Tensor  # [num_rows * max_pages] int64
    mask: Tensor  # [num_rows, 1 or q_len * num_heads, max_context] float32


@dataclass(frozen=True, slots=True)
class MlaPass:
    write_index: Tensor  # [num_tokens] int64
    rotation: Tensor  # [num_tokens, rope_dim / 2] complex64
    decode: DecodePass | None
    prefill: tuple[PrefillRow, ...]


def prepare_pass(meta: AttentionMeta, rotation_table: Tensor, num_heads: int) -> MlaPass:
    """rotation_table: [max_positions, rope_dim / 2] complex64."""
    group = meta.decode
    decode = None
    if group is not None:
        mask = group.mask  # [num_rows, q_len, max_context]
        if group.q_len > 1:  # one score row per (token, head); a single token's mask broadcasts over heads by itself
            mask = mask.unsqueeze(2).expand(-1, -1, num_heads, -1).reshape(group.num_rows, -1, mask.shape[-1])
        decode = DecodePass(group.num_rows, group.num_rows * group.q_len, group.page_table.reshape(-1), mask)
    return MlaPass(meta.write_index, rotation_table.index_select(0, meta.positions), decode, meta.prefill)
