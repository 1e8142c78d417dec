"""Token embeddings: a whole table, or one rank's rows of it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Embedding(Protocol):
    table: Tensor

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> a new [num_tokens, hidden_size] float32: this rank's part of the sum over tp."""
        ...


class WholeEmbedding:
    """Rows of a table in the checkpoint's own type, widened after the look-up."""

    def __init__(self, table: Tensor) -> None:
        self.table = table  # [vocab_size, hidden_size]

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.table.index_select(0, token_ids).to(torch.float32)


class ShardedEmbedding:
    """The words from `first` on; all others give zeros, and another rank's rows."""

    def __init__(self, table: Tensor, first: int) -> None:
        self.table = table  # [vocab_size / tp, hidden_size]
        self._first = first

    def __call__(self, token_ids: Tensor) -> Tensor:
        own = token_ids - self._first
        inside = own.clamp(0, self.table.shape[0] - 1)  # [num_tokens]
        rows = self.table.index_select(0, inside).to(torch.float32)
        return rows.masked_fill_((inside != own).unsqueeze(1), 0.0)
