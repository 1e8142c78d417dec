"""Whole checkpoints: float8 ones, float16 storage, and faults in the midst of loading."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.linear import Storage
from runtime.models.config import load_model_config
from runtime.models.deepseek import DeepseekModel
from runtime.weights import WeightSource
from tests.meta_builder import PageBook, Row, build_meta
from tests.runtime.models.checkpoints import make_oracle, save
from tests.runtime.test_weights import quantise

MINNOW = Path(__file__).parents[3] / "configs" / "minnow"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_oracle("v3_wide"), tmp_path_factory.mktemp("wide"))


def altered(folder: Path, target: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    values = {**json.loads((folder / "config.json").read_text()), **config}
    (target / "config.json").write_text(json.dumps(values))
    save_file(tensors, target / "model.safetensors")
    return target


def load(folder: Path, storage: Storage = "float32") -> DeepseekModel:
    with WeightSource(folder) as source:
        return DeepseekModel.load(source, load_model_config(folder), storage=storage)


def logits(model: DeepseekModel, length: int = 40) -> Tensor:
    token_ids = torch.randint(3, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    book, page_size = PageBook(20, 4), 4
    pages = book.pages_for(length)
    kv = model.allocate_kv(20, page_size)
    with torch.inference_mode():
        first = model.forward(token_ids[:30], [build_meta(page_size, [], [Row(0, 30, pages)])], kv)
        rest = model.forward(token_ids[30:], [build_meta(page_size, [Row(30, length - 30, pages)], [])], kv)
        return model.logits(torch.cat([first, rest]))


def test_a_float8_checkpoint_equals_its_dequantised_twin(folder: Path, tmp_path: Path) -> None:
    float8, twin = {}, {}
    for name, values in load_file(folder / "model.safetensors").items():
        if ".layers." in name and values.ndim == 2 and "mlp.gate." not in name:
            quantised, scale = quantise(values.float())
            float8[name], float8[name + "_scale_inv"] = quantised, scale
            blocks = scale.repeat_interleave(128, 0)[: values.shape[0]].repeat_interleave(128, 1)[:, : values.shape[1]]
            twin[name] = quantised.float() * blocks
        else:
            float8[name] = twin[name] = values
    assert sum(v.dtype == torch.float8_e4m3fn for v in float8.values()) > 50
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    for name, tensors in (("a", float8), ("b", twin)):
        (tmp_path / name).mkdir()
        altered(folder, tmp_path / name, tensors, quantization_config=quantisation)
    assert torch.equal(logits(load(tmp_path / "a")), logits(load(tmp_path / "b")))


def test_float16_storage_stays_near_float32() -> None:
    exact, half = logits(load(MINNOW)), logits(load(MINNOW, "float16"))
    assert 0 < (exact - half).abs().max() < 1e-3
    assert torch.equal(exact.argmax(-1), half.argmax(-1))


def test_two_halves_equal_the_whole_pass() -> None:
    model = load(MINNOW)
    book = PageBook(20, 4)
    rows = [Row(0, 6, book.pages_for(6)), Row(0, 9, book.pages_for(9))]
    token_ids = torch.arange(40, 55)
    with torch.inference_mode():
        whole = model.forward(token_ids, [build_meta(4, [], rows)], model.allocate_kv(20, 4))
        halves = [build_meta(4, [], [row]) for row in rows]
        got = model.forward(token_ids, halves, model.allocate_kv(20, 4))
    assert torch.allclose(got, whole, atol=1e-5)


def test_dummy_rows_change_nothing_else() -> None:
    model = load(MINNOW)
    page = [1, 2, 3]
    token_ids = torch.arange(40, 50)
    with torch.inference_mode():
        meta = build_meta(4, [], [Row(0, 10, page)])
        plain = model.forward(token_ids, [meta], model.allocate_kv(20, 4))
        with_dummy = replace(meta, dummy=torch.arange(10) == 9)
        masked = model.forward(token_ids, [with_dummy], model.allocate_kv(20, 4))
    assert torch.allclose(masked[:9], plain[:9], atol=1e-6)
    assert not torch.allclose(masked[9], plain[9], atol=1e-3)


def test_faults_are_named(folder: Path, tmp_path: Path) -> None:
    good = load_file(folder / "model.safetensors")
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"

    def fails(tensors: dict[str, Tensor], message: str) -> None:
        altered(folder, tmp_path, tensors)
        with pytest.raises(ValueError, match=message) as error:
            load(tmp_path)
        assert "\n" not in str(error.value)

    fails({k: v for k, v in good.items() if k != expert}, f"tensor {expert} is missing")
    fails({**good, expert: good[expert][:, :-1].contiguous()}, rf"tensor {expert} in .* has shape \[128, 255\]")
    poisoned = good[expert].clone()
    poisoned[0, 0] = torch.nan
    fails({**good, expert: poisoned}, f"tensor {expert} in .* has 1 values that are not finite")
    fails({**good, "model.layers.1.extra": torch.ones(2)}, "unexpected tensors in .*: model.layers.1.extra")
    fails({**good, "model.norm.weight": torch.ones(256, dtype=torch.int32)}, "model.norm.weight in .* has dtype I32")
    unbiased = {k: v for k, v in good.items() if k != "model.layers.2.mlp.gate.e_score_correction_bias"}
    fails(unbiased, "layers.2.mlp.gate.e_score_correction_bias is missing")


def test_rotary_tables_of_old_checkpoints_are_ignored(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    altered(folder, tmp_path, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(logits(load(tmp_path)), logits(load(folder)))


def test_a_tied_head_that_differs_is_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    altered(folder, tmp_path, tensors, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"tie_word_embeddings = true but lm_head\.weight differs"):
        load(tmp_path)
