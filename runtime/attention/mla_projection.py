"""The per-head products of latent attention, in a plain form and in one folded for small models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parallel.linear import Linear, PlainLinear
from runtime.models.rope import rotate

# Up to this many weights a layer, products of weights are multiplied out at load: fewer operations a step.
FOLD_MAX_ELEMENTS = 262_144


@dataclass(frozen=True, kw_only=True)
class MlaDims:
    num_heads: int
    rank: int  # of the latent
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float  # on attention scores

    @property
    def latent_width(self) -> int:
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


class HeadProjection(Protocol):
    """From the query input to per-head queries, and from what attention mixed to the layer's output."""

    def absorbed_query(self, query: Tensor, rotation: Tensor) -> Tensor:
        """[n, query_width] -> [n, num_heads, latent_width], contiguous, comparable with cache entries."""

    def output_of_latents(self, mixed: Tensor) -> Tensor:
        """[n, num_heads, rank] -> [n, hidden_size]."""

    def plain_query(self, query: Tensor, rotation: Tensor) -> Tensor:
        """[n, query_width] -> [num_heads, n, query_dim]."""

    def expand(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """[s, latent_width] -> keys [num_heads, s, query_dim], values [num_heads, s, value_dim]."""

    def output_of_values(self, mixed: Tensor) -> Tensor:
        """[num_heads, n, value_dim] -> [n, hidden_size]."""


class PlainProjection:
    """Products as the checkpoint holds them.

    query_proj: query input -> num_heads * query_dim, None when the input already is that.
    kv_b: [num_heads, nope_dim + value_dim, rank] float32; output_proj: num_heads * value_dim -> hidden_size.
    """

    def __init__(self, dims: MlaDims, query_proj: Linear | None, kv_b: Tensor, output_proj: Linear) -> None:
        self._dims, self._query_proj, self._output_proj = dims, query_proj, output_proj
        self._key_up = kv_b[:, : dims.nope_dim]  # [num_heads, nope_dim, rank]
        self._value_up_t = kv_b[:, dims.nope_dim :].mT  # [num_heads, rank, value_dim]
        self._kv_up_t = kv_b.flatten(0, 1).t()  # [rank, num_heads * (nope_dim + value_dim)]

    def absorbed_query(self, query: Tensor, rotation: Tensor) -> Tensor:
        heads = self._rotated_query(query, rotation)  # [n, num_heads, query_dim]
        latent = torch.bmm(heads[:, :, : self._dims.nope_dim].transpose(0, 1), self._key_up)  # [num_heads, n, rank]
        return torch.cat((latent.transpose(0, 1), heads[:, :, self._dims.nope_dim :]), -1)

    def output_of_latents(self, mixed: Tensor) -> Tensor:
        return self.output_of_values(torch.bmm(mixed.transpose(0, 1), self._value_up_t))

    def plain_query(self, query: Tensor, rotation: Tensor) -> Tensor:
        return self._rotated_query(query, rotation).transpose(0, 1)

    def expand(self, context: Tensor) -> tuple[Tensor, Tensor]:
        dims = self._dims
        up = torch.mm(context[:, : dims.rank], self._kv_up_t).view(context.shape[0], dims.num_heads, -1)
        rotary = context[:, None, dims.rank :].expand(-1, dims.num_heads, -1)
        keys = torch.cat((up[:, :, : dims.nope_dim], rotary), -1)  # [s, num_heads, query_dim]
        return keys.transpose(0, 1), up[:, :, dims.nope_dim :].transpose(0, 1)

    def output_of_values(self, mixed: Tensor) -> Tensor:
        return self._output_proj(mixed.transpose(0, 1).reshape(mixed.shape[1], -1))

    def _rotated_query(self, query: Tensor, rotation: Tensor) -> Tensor:
        dims = self._dims
        # Without a projection `query` is a slice of a wider product; rotating it in place harms nobody.
        heads = query if self._query_proj is None else self._query_proj(query)
        heads = heads.view(-1, dims.num_heads, dims.query_dim)  # [n, num_heads, query_dim]
        rotate(heads[:, :, dims.nope_dim :], rotation[:, None])
        return heads


class FoldedProjection(PlainProjection):
    """kv_b multiplied into its neighbours at load, for the absorbed form of small models.

    query_weight: [num_heads * query_dim, query_width]; output_weight: [hidden_size, num_heads * value_dim].
    """

    def __init__(self, dims: MlaDims, query_weight: Tensor, kv_b: Tensor, output_weight: Tensor) -> None:
        super().__init__(dims, PlainLinear(query_weight), kv_b, PlainLinear(output_weight))
        per_head = query_weight.view(dims.num_heads, dims.query_dim, -1)
        to_latent = torch.bmm(self._key_up.mT, per_head[:, : dims.nope_dim])  # [num_heads, rank, query_width]
        self._absorbed = PlainLinear(torch.cat((to_latent, per_head[:, dims.nope_dim :]), 1).flatten(0, 1))
        values = output_weight.view(-1, dims.num_heads, dims.value_dim).transpose(0, 1)  # [heads, hidden, value_dim]
        from_latent = torch.bmm(values, self._value_up_t.mT)  # [num_heads, hidden_size, rank]
        self._latent_output = PlainLinear(from_latent.transpose(0, 1).flatten(1))

    def absorbed_query(self, query: Tensor, rotation: Tensor) -> Tensor:
        dims = self._dims
        heads = self._absorbed(query).view(-1, dims.num_heads, dims.latent_width)
        rotate(heads[:, :, dims.rank :], rotation[:, None])
        return heads

    def output_of_latents(self, mixed: Tensor) -> Tensor:
        return self._latent_output(mixed.reshape(mixed.shape[0], -1))


def folding_pays(dims: MlaDims, query_width: int, hidden_size: int) -> bool:
    return dims.num_heads * (dims.latent_width * query_width + dims.rank * hidden_size) <= FOLD_MAX_ELEMENTS
