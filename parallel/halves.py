"""Tokens of a step's halves between whole and scattered: the collectives of both start before one is awaited."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.group import Group
from parallel.tokens import num_local_tokens, pad_to


def split_tokens(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """[sum of sizes, ...] -> one view for each half."""
    return [x] if len(sizes) == 1 else list(torch.split(x, list(sizes)))


def join_tokens(halves: list[Tensor]) -> Tensor:
    return halves[0] if len(halves) == 1 else torch.cat(halves)


def scatter_sums(group: Group, partials: list[Tensor]) -> list[Tensor]:
    """Per half [n, hidden_size], this rank's part of a sum -> [ceil(n / size), hidden_size] of the sum, zero padded."""
    if group.size == 1:
        return partials
    sizes = [group.size * num_local_tokens(group, partial.shape[0]) for partial in partials]
    pending = [group.reduce_scatter(pad_to(*half)) for half in zip(partials, sizes, strict=True)]
    return [operation.wait() for operation in pending]


def gather_halves(group: Group, local: list[Tensor], sizes: Sequence[int]) -> Tensor:
    """The inverse: per half [ceil(n / size), ...] -> [sum of sizes, ...] on every rank."""
    if group.size == 1:
        return join_tokens(local)
    pending = [group.all_gather(part) for part in local]
    return join_tokens([operation.wait()[:n] for operation, n in zip(pending, sizes, strict=True)])
