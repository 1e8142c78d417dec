"""Builds attention metadata by hand, for tests that drive a model without the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.attention.meta import AttentionMeta, DecodeGroup, PrefillRow


@dataclass
class PageBook:
    """Hands out scattered pages; page 0 stays reserved."""

    num_pages: int
    page_size: int
    seed: int = 0
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        order = torch.randperm(self.num_pages - 1, generator=torch.Generator().manual_seed(self.seed))
        self.free = (order + 1).tolist()

    def pages_for(self, num_positions: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_positions // self.page_size))]


@dataclass(frozen=True)
class Row:
    """`num_tokens` query tokens from position `start` on, over `pages`."""

    start: int
    num_tokens: int
    pages: list[int]


def build_meta(page_size: int, decode: list[Row], prefill: list[Row]) -> AttentionMeta:
    """Decode rows must agree in length; tokens are ordered decode rows first, then prefill rows."""
    positions, writes = [], []
    for row in [*decode, *prefill]:
        for position in range(row.start, row.start + row.num_tokens):
            positions.append(position)
            writes.append(row.pages[position // page_size] * page_size + position % page_size)
    rows, begin = [], sum(row.num_tokens for row in decode)
    for row in prefill:
        end = begin + row.num_tokens
        num_pages = -(-(row.start + row.num_tokens) // page_size)
        rows.append(PrefillRow(begin=begin, end=end, start=row.start, pages=torch.tensor(row.pages[:num_pages])))
        begin = end
    return AttentionMeta(
        num_tokens=len(positions),
        positions=torch.tensor(positions, dtype=torch.int64),
        write_index=torch.tensor(writes, dtype=torch.int64),
        decode=_decode_group(page_size, decode) if decode else None,
        prefill=tuple(rows),
    )


def _decode_group(page_size: int, rows: list[Row]) -> DecodeGroup:
    q_len = rows[0].num_tokens
    assert all(row.num_tokens == q_len for row in rows)
    max_pages = max(len(row.pages) for row in rows)
    table = torch.tensor([row.pages + [0] * (max_pages - len(row.pages)) for row in rows])
    key = torch.arange(max_pages * page_size)
    last_visible = torch.tensor([row.start for row in rows])[:, None] + torch.arange(q_len)  # [rows, q_len]
    mask: Tensor = torch.zeros(len(rows), q_len, len(key))
    mask.masked_fill_(key > last_visible[:, :, None], -torch.inf)
    return DecodeGroup(num_rows=len(rows), q_len=q_len, page_table=table, mask=mask)
