"""What each rank reads of a checkpoint, and which layouts and checkpoints are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.group import SoloGroup
from parallel.layout import Layout, RankGroups
from runtime.models.config import load_model_config
from runtime.models.deepseek import DeepseekModel
from runtime.models.shards import check_layout
from runtime.weights import WeightSource
from tests.meta_builder import Row, build_meta
from tests.runtime.models.checkpoints import make_oracle, save
from tests.runtime.test_weights import quantise
from tests.thread_group import run_ranks

MINNOW = Path(__file__).parents[3] / "configs" / "minnow"
TENSORS = load_file(MINNOW / "model.safetensors")
# Of the 14.9 MB 0.9 are on every rank, 8.2 are cut over tp, and 5.9 are routed experts, cut over ep.
BYTES_PER_RANK = [(1, 1, 14_944_064), (1, 2, 7_915_328), (1, 4, 4_400_960), (2, 1, 11_994_944), (2, 2, 6_440_768)]


def is_cut_over_tp(name: str) -> bool:
    cut = ("q_b_proj", "kv_b_proj", "o_proj", "layers.0.mlp.", "embed_tokens", "lm_head", "shared_head.head")
    return any(part in name for part in cut)


def is_routed_expert(name: str) -> bool:
    return ".mlp.experts." in name


def seat(layout: Layout, rank: int) -> RankGroups:
    """Groups that know their place and nothing else: loading calls no collective."""
    groups = RankGroups(tp=SoloGroup("tp"), ep=SoloGroup("ep"))
    groups.tp.rank, groups.tp.size = layout.tp_rank(rank), layout.tp
    groups.ep.rank, groups.ep.size = rank, layout.ep
    return groups


def bytes_by_tensor(folder: Path, layout: Layout, rank: int) -> dict[str, int]:
    with WeightSource(folder) as source:
        DeepseekModel.load(source, load_model_config(folder), groups=seat(layout, rank), storage="float32")
        count = source.bytes_by_tensor()
        assert source.bytes_read == sum(count.values())
        return count


@pytest.mark.parametrize(("dp", "tp", "total"), BYTES_PER_RANK)
def test_ranks_read_their_slices_and_nothing_else(dp: int, tp: int, total: int) -> None:
    layout = Layout(dp=dp, tp=tp)
    ranks = [bytes_by_tensor(MINNOW, layout, rank) for rank in range(layout.ep)]
    for name, tensor in TENSORS.items():
        size = tensor.numel() * tensor.element_size()
        read = [rank.get(name, 0) for rank in ranks]
        if is_routed_expert(name):  # whole, by one rank
            assert sorted(read) == [0] * (layout.ep - 1) + [size], name
        elif is_cut_over_tp(name):  # an equal slice each, which add up to the whole in every dp group
            assert read == [size // tp] * layout.ep, name
        else:
            assert read == [size] * layout.ep, name
    assert [sum(rank.values()) for rank in ranks] == [total] * layout.ep


def test_float8_slices_come_with_their_scales(tmp_path: Path) -> None:
    """Slices that cut blocks of 128 apart give the values of the whole."""
    folder, plain = tmp_path / "float8", save(make_oracle("v3_wide"), tmp_path / "plain")
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, values in load_file(plain / "model.safetensors").items():
        if ".layers." in name and values.ndim == 2 and "mlp.gate." not in name:
            tensors[name], tensors[name + "_scale_inv"] = quantise(values.float())
        else:
            tensors[name] = values
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    write(folder, tensors, json.dumps(config))

    pages, token_ids = [3, 1, 2], torch.arange(40, 50)
    meta = build_meta(4, [], [Row(0, 10, pages)])

    def logits(groups: RankGroups | None) -> Tensor:
        with WeightSource(folder) as source:
            model = DeepseekModel.load(source, load_model_config(folder), groups=groups, storage="float32")
        return model.logits(model.forward(token_ids, [meta], model.allocate_kv(4, 4)))

    with torch.inference_mode():
        whole = logits(None)
    parts = run_ranks(Layout(tp=4), lambda _, groups: logits(groups))
    assert (torch.cat(parts, 1) - whole).abs().max() <= 1e-4
    assert whole.std() > 0.1


def write(folder: Path, tensors: dict[str, Tensor], config: str) -> None:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: None, "tensor .*experts.15.up_proj.weight is missing"),
        (lambda t: t[:, 1:].contiguous(), r"15.up_proj.weight in .* has shape \[64, 191\], expected \[64, 192\]"),
        (lambda t: t.to(torch.int32), "experts.15.up_proj.weight in .* has dtype I32"),
        (lambda t: t.to(torch.float8_e4m3fn), "experts.15.up_proj.weight in .* is float8 but .*_scale_inv is missing"),
    ],
    ids=["missing", "shape", "dtype", "scale"],
)
def test_every_rank_refuses_a_fault_in_the_experts_of_another(
    change: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.experts.15.up_proj.weight"
    tensors, changed = dict(TENSORS), change(TENSORS[name])
    del tensors[name]
    write(tmp_path, tensors if changed is None else {**tensors, name: changed}, (MINNOW / "config.json").read_text())
    for rank in range(2):
        with pytest.raises(ValueError, match=message):
            bytes_by_tensor(tmp_path, Layout(dp=2), rank)


def test_tensors_that_nobody_asks_for_are_still_refused(tmp_path: Path) -> None:
    extra = "model.layers.1.mlp.experts.16.up_proj.weight"
    write(tmp_path, {**TENSORS, extra: torch.ones(2)}, (MINNOW / "config.json").read_text())
    with pytest.raises(ValueError, match=f"unexpected tensors in .*: {extra}"):
        bytes_by_tensor(tmp_path, Layout(dp=2), 0)


def test_an_mtp_layer_with_its_own_words_on_some_ranks(tmp_path: Path) -> None:
    """Only the last word differs: rank 0 finds copies of the target's, rank 1 does not."""
    embed, head = "model.layers.5.embed_tokens.weight", "model.layers.5.shared_head.head.weight"
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    tensors[embed][-1] += 1
    tensors[head][-1] *= 3
    write(tmp_path, tensors, (MINNOW / "config.json").read_text())
    meta = build_meta(4, [], [Row(0, 6, [2, 1])])
    hidden = torch.randn(6, 192, generator=torch.Generator().manual_seed(0))
    token_ids = torch.tensor([5, 4095, 7, 4095, 2047, 2048])

    def drafts(folder: Path, groups: RankGroups | None) -> Tensor:
        with WeightSource(folder) as source:
            model = DeepseekModel.load(source, load_model_config(folder), groups=groups, storage="float32")
        assert model.mtp is not None
        return model.mtp.logits(model.mtp.forward(token_ids, hidden, [meta], model.allocate_kv(4, 4)))

    with torch.inference_mode():
        whole, shared = drafts(tmp_path, None), drafts(MINNOW, None)
    parts = run_ranks(Layout(tp=2), lambda _, groups: drafts(tmp_path, groups))
    assert (torch.cat(parts, 1) - whole).abs().max() <= 1e-4
    assert (whole - shared).abs().max() > 0.1


def test_layouts_that_do_not_divide_are_refused_with_both_numbers() -> None:
    config = load_model_config(MINNOW)
    for layout in (Layout(), Layout(tp=8), Layout(dp=16), Layout(dp=2, tp=4)):
        check_layout(config, layout)

    def refused(layout: Layout, message: str, **changes: int) -> None:
        with pytest.raises(ValueError, match=f"^{message}$".replace("*", r"\*")):
            check_layout(replace(config, **changes), layout)  # type: ignore[arg-type]

    refused(Layout(tp=3), "tp = 3 does not divide num_attention_heads = 8")
    refused(Layout(dp=3), "dp * tp = 3 does not divide n_routed_experts = 16")
    refused(Layout(dp=3, tp=2), "dp * tp = 6 does not divide n_routed_experts = 16")
    refused(Layout(tp=4), "tp = 4 does not divide vocab_size = 4098", vocab_size=4098)
    refused(Layout(tp=8), "tp = 8 does not divide intermediate_size = 516", intermediate_size=516)
    all_sparse = replace(config, num_dense_layers=0, intermediate_size=515)
    check_layout(all_sparse, Layout(tp=2))  # no dense layer: that width is never used
    check_layout(replace(config, router=None, num_dense_layers=6), Layout(dp=3))
