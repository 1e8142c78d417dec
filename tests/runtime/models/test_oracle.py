"""Logits against transformers (float32): whole prompts, chunks, and decoding over scattered pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from parallel.linear import Storage
from runtime.models.config import load_model_config
from runtime.models.deepseek import DeepseekModel
from runtime.weights import WeightSource
from tests.meta_builder import PageBook, Row, build_meta
from tests.runtime.models.checkpoints import CONFIGURATIONS, make_oracle, save

TOLERANCE = 1e-4
PAGE_SIZE = 4
NUM_PAGES = 80
LENGTHS = (37, 50, 23)
MINNOW = Path(__file__).parents[3] / "configs" / "minnow"


def load(folder: Path, storage: Storage = "float32") -> DeepseekModel:
    with WeightSource(folder) as source:
        return DeepseekModel.load(source, load_model_config(folder), storage=storage)


class Case:
    """One model beside its oracle, with prompts and the oracle's logits."""

    def __init__(self, model: DeepseekModel, oracle: PreTrainedModel) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(1)
        vocab = model.config.vocab_size
        self.prompts = [torch.randint(0, vocab, (n,), generator=generator) for n in LENGTHS]
        with torch.inference_mode():
            self.expected = [oracle(p[None]).logits[0] for p in self.prompts]  # [n, vocab]
        book = PageBook(NUM_PAGES, PAGE_SIZE)
        self.pages = [book.pages_for(n) for n in LENGTHS]
        self.kv = model.allocate_kv(NUM_PAGES, PAGE_SIZE)
        for layer in self.kv:  # stale values of earlier owners must not matter
            layer.uniform_(-5, 5, generator=generator)

    def run(self, decode: list[tuple[int, int, int]], prefill: list[tuple[int, int, int]]) -> None:
        """Rows are (prompt, begin, end); the logits of every token must be the oracle's."""
        rows = [[Row(begin, end - begin, self.pages[i]) for i, begin, end in part] for part in (decode, prefill)]
        token_ids = torch.cat([self.prompts[i][begin:end] for i, begin, end in decode + prefill])
        with torch.inference_mode():
            hidden = self.model.forward(token_ids, [build_meta(PAGE_SIZE, *rows)], self.kv)
            logits = self.model.logits(hidden)
        expected = torch.cat([self.expected[i][begin:end] for i, begin, end in decode + prefill])
        assert_close(logits, expected)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() <= TOLERANCE
    assert expected.std() > 0.1  # a constant would pass for anything


@pytest.fixture(scope="module", params=[*CONFIGURATIONS, "minnow"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "minnow":
        oracle = AutoModelForCausalLM.from_pretrained(MINNOW, dtype=torch.float32, attn_implementation="eager")
        return Case(load(MINNOW), oracle)
    oracle = make_oracle(request.param)
    sharded = request.param == "v3"
    folder = save(oracle, tmp_path_factory.mktemp(request.param), sharded=sharded)
    assert sharded == (folder / "model.safetensors.index.json").exists()
    return Case(load(folder), oracle)


def test_whole_prompts(case: Case) -> None:
    case.run([], [(i, 0, n) for i, n in enumerate(LENGTHS)])


def test_one_long_prefill_alone(case: Case) -> None:
    case.run([], [(1, 0, LENGTHS[1])])


def test_chunks_of_uneven_size(case: Case) -> None:
    for begin, end in ((0, 5), (5, 6), (6, 20), (20, 23)):
        case.run([], [(i, begin, end) for i in range(3)])


@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_decode_rows_of_different_lengths(case: Case, q_len: int) -> None:
    starts = (29, 41, 13)
    case.run([], [(i, 0, start) for i, start in enumerate(starts)])
    for offset in range(0, 8, q_len):
        case.run([(i, start + offset, start + offset + q_len) for i, start in enumerate(starts)], [])
    case.run([(0, 30, 30 + q_len)], [])  # one row alone, over positions already written


def test_prefill_chunks_beside_decode_rows(case: Case) -> None:
    case.run([], [(0, 0, 20), (2, 0, 11)])
    case.run([(0, 20, 22), (2, 11, 13)], [(1, 0, 17)])
    case.run([(0, 22, 24)], [(1, 17, 50), (2, 13, 23)])
