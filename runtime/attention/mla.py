"""Multi-head latent attention over a paged cache of latents (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.linear import Linear
from parallel.norm import RmsNorm
from runtime.attention.meta import PrefillRow
from runtime.attention.mla_pass import DecodePass, MlaPass
from runtime.attention.mla_projection import HeadProjection, MlaDims
from runtime.models.rope import rotate

# Queries a tile of prefill attention; at 64 the scores of 8 heads over 1,000 positions take 2 MB.
QUERY_TILE = 64


@dataclass(frozen=True, kw_only=True)
class MlaWeights:
    """Everything one attention layer multiplies with. `input_proj` fuses the query's and the latent's projections."""

    input_proj: Linear  # hidden -> [query input | latent | rotary key]
    query_norm: RmsNorm | None  # None: no low-rank form, the first part is the query itself
    latent_norm: RmsNorm
    heads: HeadProjection


class MlaAttention:
    """Writes the latents of all tokens to the cache, then lets every row attend to its own pages.

    A cache position holds `[latent after its norm | rotated key part]`. Decode rows attend in latent space
    (absorbed form); a prefill row takes that or the expanded form, whichever costs fewer products.
    """

    def __init__(self, dims: MlaDims, weights: MlaWeights) -> None:
        self._dims = dims
        self._weights = weights
        self._query_width = weights.input_proj.out_features - dims.latent_width

    def __call__(self, hidden: Tensor, prepared: MlaPass, kv: Tensor) -> Tensor:
        """hidden: [num_tokens, hidden_size]; kv: [num_pages, page_size, latent_width], written in place.

        Returns [num_tokens, hidden_size], the output projection included: this rank's part of the sum over its heads.
        """
        weights = self._weights
        projected = weights.input_proj(hidden)  # [num_tokens, query_width + latent_width]
        self._write_latents(projected, prepared, kv)
        query = projected[:, : self._query_width]
        if weights.query_norm is not None:
            query = weights.query_norm(query)  # [num_tokens, q_lora_rank]
        parts = []
        decode = prepared.decode
        if decode is not None:
            parts.append(self._decode(query[: decode.num_tokens], prepared, decode, kv))
        parts += [self._prefill(query[row.begin : row.end], prepared, row, kv) for row in prepared.prefill]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _write_latents(self, projected: Tensor, prepared: MlaPass, kv: Tensor) -> None:
        dims = self._dims
        latent = self._weights.latent_norm(projected[:, self._query_width : -dims.rope_dim])
        rotary = rotate(projected[:, -dims.rope_dim :], prepared.rotation)
        # What is written must be finite: 0 * NaN in a masked position would reach other rows through the products.
        entry = torch.cat((latent, rotary), 1).nan_to_num_(0.0, 0.0, 0.0)  # [num_tokens, latent_width]
        kv.view(-1, dims.latent_width).index_copy_(0, prepared.write_index, entry)

    def _decode(self, query: Tensor, prepared: MlaPass, decode: DecodePass, kv: Tensor) -> Tensor:
        """query: [num_rows * q_len, query_width] -> [num_rows * q_len, hidden_size]."""
        dims, heads = self._dims, self._weights.heads
        absorbed = heads.absorbed_query(query, prepared.rotation[: decode.num_tokens])
        absorbed = absorbed.view(decode.num_rows, -1, dims.latent_width)  # [num_rows, q_len * num_heads, latent_width]
        context = kv.view(kv.shape[0], -1).index_select(0, decode.pages)
        context = context.view(decode.num_rows, -1, dims.latent_width)  # [num_rows, max_context, latent_width]
        scores = torch.baddbmm(decode.mask, absorbed, context.mT, alpha=dims.scale)
        mixed = torch.bmm(torch.softmax(scores, -1), context[:, :, : dims.rank])
        return heads.output_of_latents(mixed.view(decode.num_tokens, dims.num_heads, dims.rank))

    def _prefill(self, query: Tensor, prepared: MlaPass, row: PrefillRow, kv: Tensor) -> Tensor:
        """query: [n, query_width] of one row -> [n, hidden_size]."""
        dims, heads = self._dims, self._weights.heads
        num_new, num_context = row.end - row.begin, row.start + row.end - row.begin
        context = kv.view(kv.shape[0], -1).index_select(0, row.pages).view(-1, dims.latent_width)[:num_context]
        rotation = prepared.rotation[row.begin : row.end]
        if absorbed_is_cheaper(dims, num_new, num_context):
            queries = heads.absorbed_query(query, rotation).transpose(0, 1)  # [num_heads, n, latent_width]
            shared = context.expand(dims.num_heads, -1, -1)  # every head reads the same entries
            mixed = causal_attention(queries, shared, shared[:, :, : dims.rank], row.start, dims.scale)
            return heads.output_of_latents(mixed.transpose(0, 1))
        keys, values = heads.expand(context)  # [num_heads, num_context, query_dim], [.., value_dim]
        queries = heads.plain_query(query, rotation)  # [num_heads, n, query_dim]
        return heads.output_of_values(causal_attention(queries, keys, values, row.start, dims.scale))


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """Attention of `n` queries at positions from `start` on over all `start + n` positions, in tiles.

    A tile's scores stay in the processor's cache, and what lies behind its last query is never computed.
    queries: [num_heads, n, dim], keys: [num_heads, start + n, dim], values: [num_heads, start + n, value_dim].
    Returns [num_heads, n, value_dim].
    """
    tiles = []
    for begin in range(0, queries.shape[1], QUERY_TILE):
        tile = queries[:, begin : begin + QUERY_TILE]
        visible = start + begin + tile.shape[1]
        mask = causal_mask(tile.shape[1], start + begin, queries.device)  # [tile, visible]
        scores = torch.baddbmm(mask, tile, keys[:, :visible].mT, alpha=scale)  # [num_heads, tile, visible]
        tiles.append(torch.bmm(torch.softmax(scores, -1), values[:, :visible]))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, 1)


def causal_mask(num_new: int, start: int, device: torch.device) -> Tensor:
    """[num_new, start + num_new] float32: 0 where key j <= start + i, -inf elsewhere."""
    mask = torch.full((num_new, start + num_new), -torch.inf, device=device)
    return mask.triu_(start + 1)


def absorbed_is_cheaper(dims: MlaDims, num_new: int, num_context: int) -> bool:
    """Compare the multiplications of both forms for `num_new` queries over `num_context` positions."""
    up = dims.num_heads * dims.rank * (dims.nope_dim + dims.value_dim)  # through kv_b_proj, for one position
    pairs = num_new * num_context * dims.num_heads
    absorbed = num_new * up + pairs * (dims.latent_width + dims.rank)
    expanded = num_context * up + pairs * (dims.nope_dim + dims.rope_dim + dims.value_dim)
    return absorbed < expanded
