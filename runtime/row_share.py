"""Which rows of a step a rank decides: each row exactly one, dealt evenly over the attention group."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from parallel.group import Group


class RowShare:
    """Rows `rank * per .. (rank + 1) * per` of R, padded at the end to a multiple of the group's size.

    A logit that rounds differently on another rank can then change nothing: nobody else looks at that row.
    """

    def __init__(self, group: Group, num_rows: int) -> None:
        self._group = group
        self._num_rows = num_rows
        self.per_rank = -(-num_rows // group.size)
        self._padding = self.per_rank * group.size - num_rows
        self._begin = group.rank * self.per_rank

    @property
    def is_whole(self) -> bool:
        """Whether this rank decides every row."""
        return self._group.size == 1

    def mine(self, values: Tensor) -> Tensor:
        """[R, ...] -> this rank's [r, ...]; zeros (the dummy slot) where there are no more rows."""
        if self._group.size == 1:
            return values
        return self._padded(values)[self._begin : self._begin + self.per_rank]

    def mine_on_host(self, values: NDArray[np.integer]) -> NDArray[np.integer]:
        if self._group.size == 1:
            return values
        return np.pad(values, (0, self._padding))[self._begin : self._begin + self.per_rank]

    def whole_logits(self, shard: Tensor) -> Tensor:
        """This rank's columns of all rows [R, Q, V / tp] -> all columns of this rank's rows [r, Q, V]."""
        if self._group.size == 1:
            return shard
        parts = self._group.all_to_all(self._padded(shard)).wait()  # [tp * r, Q, V / tp], in order of columns
        return torch.cat(parts.chunk(self._group.size), -1)

    def gather(self, values: Tensor) -> Tensor:
        """This rank's [r, ...] -> everybody's [R, ...]."""
        if self._group.size == 1:
            return values
        return self._group.all_gather(values).wait()[: self._num_rows]

    def _padded(self, values: Tensor) -> Tensor:
        if not self._padding:
            return values
        return F.pad(values, (0, 0) * (values.dim() - 1) + (0, self._padding))
