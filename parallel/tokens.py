"""Tokens scattered over a group's ranks: each keeps ceil(n / size) of n rows, padded with zeros at the end."""

from __future__ import annotations

from torch import Tensor

from parallel.group import Group


def num_local_tokens(group: Group, num_tokens: int) -> int:
    """Rows that each rank keeps, padding included."""
    return -(-num_tokens // group.size)


def pad_to(x: Tensor, size: int) -> Tensor:
    """[n, ...] -> [size, ...] with zero rows at the end; `x` itself when nothing is missing."""
    num_missing = size - x.shape[0]
    assert num_missing >= 0, (x.shape, size)
    if num_missing == 0:
        return x
    padded = x.new_zeros((size, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded


def gather_tokens(group: Group, local: Tensor, num_tokens: int) -> Tensor:
    """[ceil(num_tokens / size), ...] of each rank -> [num_tokens, ...] on all; waits. One rank alone: `local`."""
    if group.size == 1:
        return local
    return group.all_gather(local).wait()[:num_tokens]


def reduce_scatter_tokens(group: Group, partial: Tensor) -> Tensor:
    """[n, ...], this rank's share of a sum -> [ceil(n / size), ...] of the sum; waits. One rank alone: `partial`."""
    if group.size == 1:
        return partial
    return group.reduce_scatter(pad_to(partial, group.size * num_local_tokens(group, partial.shape[0]))).wait()


def local_slice(group: Group, full: Tensor) -> Tensor:
    """[n, ...], equal on all ranks -> this rank's [ceil(n / size), ...]. One rank alone: `full`."""
    if group.size == 1:
        return full
    num_local = num_local_tokens(group, full.shape[0])
    begin = group.rank * num_local
    return pad_to(full[begin : begin + num_local], num_local)
