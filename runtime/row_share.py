"""Which rows of a step a rank decides: each row exactly one, dealt evenly over the attention group."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallel.group import Group
from parallel.tokens import gather_tokens, local_slice, num_local_tokens, pad_to


class RowShare:
    """Rows `rank * r .. (rank + 1) * r` of R, padded at the end to a multiple of the group's size: as tokens are dealt.

    A logit that rounds differently on another rank can then change nothing: nobody else looks at that row.
    """

    def __init__(self, group: Group, num_rows: int) -> None:
        self._group = group
        self._num_rows = num_rows
        self._padded_rows = group.size * num_local_tokens(group, num_rows)

    @property
    def is_whole(self) -> bool:
        """Whether this rank decides every row."""
        return self._group.size == 1

    def mine(self, values: Tensor) -> Tensor:
        """[R, ...] -> this rank's [r, ...]; zeros (the dummy slot) where there are no more rows."""
        return local_slice(self._group, values)

    def mine_on_host(self, values: NDArray[np.integer]) -> NDArray[np.integer]:
        if self.is_whole:
            return values
        padded = np.pad(values, (0, self._padded_rows - self._num_rows))
        return np.split(padded, self._group.size)[self._group.rank]

    def whole_logits(self, shard: Tensor) -> Tensor:
        """This rank's columns of all rows [R, Q, V / tp] -> all columns of this rank's rows [r, Q, V]."""
        if self.is_whole:
            return shard
        parts = self._group.all_to_all(pad_to(shard, self._padded_rows)).wait()  # [tp * r, Q, V / tp], by columns
        return torch.cat(parts.chunk(self._group.size), -1)

    def gather(self, values: Tensor) -> Tensor:
        """This rank's [r, ...] -> everybody's [R, ...]."""
        return gather_tokens(self._group, values, self._num_rows)
