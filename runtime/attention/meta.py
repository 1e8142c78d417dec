"""Where the tokens of one pass sit: what attention needs to know besides the hidden states.

A pass has `num_tokens` query tokens. First come `decode.num_rows * decode.q_len` tokens of the decode group (verify
rows, all of one length), then the tokens of each prefill row in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KvSpec:
    """Shape of one layer's share of a KV page: `width` values of `dtype_bytes` a position."""

    num_layers: int
    width: int
    dtype_bytes: int

    @property
    def bytes_per_position(self) -> int:
        return self.num_layers * self.width * self.dtype_bytes


@dataclass(frozen=True, kw_only=True)
class DecodeGroup:
    """Rows of `q_len` tokens each at consecutive positions; their lengths live on the device."""

    num_rows: int
    q_len: int
    page_table: Tensor  # [num_rows, max_pages] int64, 0 beyond a row's pages; max_pages is the host's upper bound
    mask: Tensor  # [num_rows, q_len, max_pages * page_size] float32, 0 where visible, -inf where not


@dataclass(frozen=True, kw_only=True)
class PrefillRow:
    """One chunk of a prompt: tokens `[begin, end)` of the pass at positions `[start, start + end - begin)`."""

    begin: int
    end: int
    start: int
    pages: Tensor  # [num_pages] int64, covers positions 0 .. start + end - begin - 1


@dataclass(frozen=True, kw_only=True)
class AttentionMeta:
    num_tokens: int
    positions: Tensor  # [num_tokens] int64, clamped to the context limit
    write_index: Tensor  # [num_tokens] int64: page * page_size + offset; masked writes go to page 0
    decode: DecodeGroup | None
    prefill: tuple[PrefillRow, ...]
    dummy: Tensor | None = None  # [num_tokens] bool: of dummy rows, which no expert sees; None: no such row
    capacity: int | None = None  # most tokens of any dp group in this pass, where groups exchange them; else None
