"""What the oracle tests cannot see: isolation of rows, the choice of form, and the folded products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel.linear import PlainLinear
from runtime.attention.mla import QUERY_TILE, absorbed_is_cheaper, causal_attention, causal_mask
from runtime.attention.mla_projection import FoldedProjection, MlaDims, PlainProjection
from runtime.models.config import load_model_config
from runtime.models.deepseek import DeepseekModel
from runtime.models.rope import RopeConfig, rotation_table
from runtime.weights import WeightSource
from tests.meta_builder import PageBook, Row, build_meta

MINNOW = Path(__file__).parents[3] / "configs" / "minnow"
DIMS = MlaDims(num_heads=4, rank=16, nope_dim=12, rope_dim=8, value_dim=20, scale=0.2)


def test_causal_mask_over_a_context() -> None:
    mask = causal_mask(3, 2, torch.device("cpu"))
    visible = (mask == 0).tolist()
    assert visible == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]


@pytest.mark.parametrize("num_new", [1, QUERY_TILE, QUERY_TILE + 1, 3 * QUERY_TILE + 5])
@pytest.mark.parametrize("start", [0, 37])
def test_tiles_equal_one_whole_softmax(num_new: int, start: int) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(4, num_new, 20, generator=generator)
    keys = torch.randn(4, start + num_new, 20, generator=generator)
    values = torch.randn(4, start + num_new, 10, generator=generator)
    scores = queries @ keys.mT * 0.3 + causal_mask(num_new, start, torch.device("cpu"))
    expected = scores.softmax(-1) @ values
    assert torch.allclose(causal_attention(queries, keys, values, start, 0.3), expected, atol=1e-5)


def test_cheaper_form() -> None:
    dims = MlaDims(num_heads=8, rank=512, nope_dim=128, rope_dim=64, value_dim=128, scale=1.0)
    assert absorbed_is_cheaper(dims, 4, 2000)  # few queries over a long context
    assert not absorbed_is_cheaper(dims, 512, 512)


def test_folded_products_equal_plain_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    query_weight = torch.randn(4 * 20, 24, generator=generator) * 0.2
    kv_b = torch.randn(4, 32, 16, generator=generator) * 0.2
    output_weight = torch.randn(30, 4 * 20, generator=generator) * 0.2
    plain = PlainProjection(DIMS, PlainLinear(query_weight), kv_b, PlainLinear(output_weight))
    folded = FoldedProjection(DIMS, query_weight, kv_b, output_weight)
    rotation = rotation_table(RopeConfig(theta=100.0), 8, 5, torch.device("cpu"))
    query, mixed = torch.randn(5, 24, generator=generator), torch.randn(5, 4, 16, generator=generator)
    assert torch.allclose(folded.absorbed_query(query, rotation), plain.absorbed_query(query, rotation), atol=1e-5)
    assert torch.allclose(folded.output_of_latents(mixed), plain.output_of_latents(mixed), atol=1e-5)


@torch.inference_mode()
def test_a_row_with_nan_stays_alone() -> None:
    """A NaN in one row's input shows in that row only, in this pass and in later ones over reused pages."""
    with WeightSource(MINNOW) as source:
        model = DeepseekModel.load(source, load_model_config(MINNOW), storage="float32", with_mtp=False)
    book = PageBook(20, 4)
    pages = [book.pages_for(12), book.pages_for(12)]
    token_ids = torch.arange(10, 34)
    clean = model.forward(token_ids, [build_meta(4, [], [Row(0, 12, p) for p in pages])], model.allocate_kv(20, 4))

    kv = model.allocate_kv(20, 4)
    broken = model._embed.table.float()
    broken[10:22] = torch.nan  # the tokens of row 0
    healthy, model._embed.table = model._embed.table, broken
    got = model.forward(token_ids, [build_meta(4, [], [Row(0, 12, p) for p in pages])], kv)
    assert got[:12].isnan().all()
    assert torch.allclose(got[12:], clean[12:], atol=1e-5)
    assert all(layer.isfinite().all() for layer in kv)

    model._embed.table = healthy  # the pages of row 0 go to a new request, partly stale, as masked positions
    both = build_meta(4, [Row(11, 1, pages[1]), Row(0, 1, pages[0])], [])
    again = model.forward(torch.tensor([33, 10]), [both], kv)
    assert again.isfinite().all()
    assert torch.allclose(again[0], clean[23], atol=1e-4)
