"""The MTP head over the paged cache against a plain reference built from transformers' decoder layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

from runtime.attention.meta import AttentionMeta
from runtime.models.config import load_model_config
from runtime.models.deepseek import DeepseekModel
from runtime.weights import WeightSource
from tests.meta_builder import PageBook, Row, build_meta

MINNOW = Path(__file__).parents[2] / "configs" / "minnow"
PAGE_SIZE, NUM_PAGES, LENGTH = 4, 40, 30
TOLERANCE = 1e-4


class ReferenceHead(nn.Module):
    """The published formulas on whole sequences, without a cache."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = DeepseekV3Config.from_pretrained(folder, attn_implementation="eager")
        prefix = f"model.layers.{config.num_hidden_layers}."
        everything = load_file(folder / "model.safetensors")
        tensors = {k[len(prefix) :]: v.float() for k, v in everything.items() if k.startswith(prefix)}
        self.eps, self.tensors = config.rms_norm_eps, tensors
        self.embed, self.head = everything["model.embed_tokens.weight"].float(), everything["lm_head.weight"].float()
        self.rotary = DeepseekV3RotaryEmbedding(config)
        self.block = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.block.load_state_dict(fuse_experts(tensors, config.n_routed_experts))

    def norm(self, x: Tensor, name: str) -> Tensor:
        module = DeepseekV3RMSNorm(x.shape[-1], self.eps)
        module.weight = nn.Parameter(self.tensors[name])
        return module(x)

    def forward(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """[n], [n, hidden] -> states [n, hidden] at positions 0..n-1."""
        both = torch.cat(
            [self.norm(self.embed[token_ids], "enorm.weight"), self.norm(hidden, "hnorm.weight")], -1
        )
        n = len(token_ids)
        mask = torch.full((1, 1, n, n), -torch.inf).triu(1)
        x = F.linear(both, self.tensors["eh_proj.weight"])[None]
        positions = torch.arange(n)[None]
        x = self.block(x, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary(x, positions))
        return self.norm(x[0], "shared_head.norm.weight")

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.head)


def fuse_experts(tensors: dict[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """Per-expert tensors in the joined form of transformers' module."""
    names = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    state = {k: v for k, v in tensors.items() if k.startswith(names) and ".experts." not in k}

    def joined(kind: str) -> Tensor:
        return torch.stack([tensors[f"mlp.experts.{e}.{kind}.weight"] for e in range(num_experts)])

    state["mlp.experts.gate_up_proj"] = torch.cat([joined("gate_proj"), joined("up_proj")], 1)
    state["mlp.experts.down_proj"] = joined("down_proj")
    return state


class Bench:
    def __init__(self, folder: Path) -> None:
        with WeightSource(folder) as source:
            self.model = DeepseekModel.load(source, load_model_config(folder), storage="float32")
        assert self.model.mtp is not None
        self.head = self.model.mtp
        self.reference = ReferenceHead(folder)
        generator = torch.Generator().manual_seed(5)
        self.token_ids = torch.randint(3, 4096, (LENGTH,), generator=generator)
        book = PageBook(NUM_PAGES, PAGE_SIZE)
        self.pages = book.pages_for(LENGTH + 8)
        self.kv = self.model.allocate_kv(NUM_PAGES, PAGE_SIZE)
        self.hidden = self.model.forward(self.token_ids, [self.prefill(0, LENGTH)], self.kv)  # H_0 .. H_{n-1}

    def prefill(self, begin: int, end: int) -> AttentionMeta:
        return build_meta(PAGE_SIZE, [], [Row(begin, end - begin, self.pages)])

    def decode(self, begin: int, end: int) -> AttentionMeta:
        return build_meta(PAGE_SIZE, [Row(begin, end - begin, self.pages)], [])


@pytest.fixture(scope="module")
def bench() -> Bench:
    with torch.inference_mode():
        return Bench(MINNOW)


@torch.inference_mode()
def test_single_pass_over_prefill_and_decode(bench: Bench) -> None:
    expected = bench.reference(bench.token_ids[1:], bench.hidden[:-1])  # positions 0 .. n-2
    states = []
    for meta, begin, end in (
        (bench.prefill(0, 11), 0, 11), (bench.prefill(11, 20), 11, 20),
        (bench.decode(20, 22), 20, 22), (bench.decode(22, 23), 22, 23), (bench.decode(23, 29), 23, 29),
    ):
        next_ids = bench.token_ids[begin + 1 : end + 1]
        states.append(bench.head.forward(next_ids, bench.hidden[begin:end], [meta], bench.kv))
    got = torch.cat(states)
    assert (got - expected).abs().max() <= TOLERANCE
    logits, expected_logits = bench.head.logits(got), bench.reference.logits(expected)
    assert (logits - expected_logits).abs().max() <= TOLERANCE
    # trained to predict x_{i+2}: a wrong pairing of token and state would not agree with the target this often
    target = bench.model.logits(bench.hidden[1:]).argmax(-1)
    assert (logits.argmax(-1) == target).float().mean() > 0.2


@torch.inference_mode()
def test_recursive_passes_feed_on_the_heads_own_states(bench: Bench) -> None:
    """k = 3: one pass on the target's state, two on the head's own, each a position further."""
    n = 20
    tokens, hidden = bench.token_ids[1 : n + 1].clone(), bench.hidden[:n].clone()
    bench.head.forward(tokens[:-1], hidden[:-1], [bench.prefill(0, n - 1)], bench.kv)
    state = bench.head.forward(tokens[-1:], hidden[-1:], [bench.decode(n - 1, n)], bench.kv)
    drafts = [int(bench.head.logits(state).argmax())]
    for step in range(2):
        position = n + step
        state = bench.head.forward(
            torch.tensor(drafts[-1:]), state, [bench.decode(position, position + 1)], bench.kv
        )
        drafts.append(int(bench.head.logits(state).argmax()))

    expected: list[int] = []
    for _ in range(3):  # the reference recomputes the whole sequence, its own states appended
        states = bench.reference(tokens, hidden)
        logits = bench.reference.logits(states[-1])
        expected.append(int(logits.argmax()))
        tokens = torch.cat([tokens, torch.tensor(expected[-1:])])
        hidden = torch.cat([hidden, states[-1:]])
    assert drafts == expected
    assert (bench.head.logits(state)[0] - logits).abs().max() <= TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize("change", ["copies absent", "own embedding and head"])
def test_embedding_and_head_are_shared_unless_they_differ(bench: Bench, tmp_path: Path, change: str) -> None:
    tensors = load_file(MINNOW / "model.safetensors")
    names = ("model.layers.5.embed_tokens.weight", "model.layers.5.shared_head.head.weight")
    for name in names:
        if change == "copies absent":
            del tensors[name]
        else:
            tensors[name] = tensors[name].flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((MINNOW / "config.json").read_bytes())
    with WeightSource(tmp_path) as source:
        model = DeepseekModel.load(source, load_model_config(tmp_path), storage="float32")
    assert model.mtp is not None
    meta, kv = bench.prefill(0, 8), model.allocate_kv(NUM_PAGES, PAGE_SIZE)
    token_ids = bench.token_ids[1:9]
    ours = token_ids if change == "copies absent" else 4095 - token_ids  # the flipped table holds the row there
    got = model.mtp.logits(model.mtp.forward(ours, bench.hidden[:8], [meta], kv))
    expected = bench.reference.logits(bench.reference(token_ids, bench.hidden[:8]))
    if change != "copies absent":
        expected = expected.flip(-1)
    assert (got - expected).abs().max() <= TOLERANCE


def test_a_model_without_its_mtp_layer(tmp_path: Path) -> None:
    tensors = load_file(MINNOW / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if ".layers.5." not in k}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((MINNOW / "config.json").read_bytes())
    config = load_model_config(tmp_path)
    complaint = r"no tensors model\.layers\.5\.\*; set draft_tokens to 0"
    with WeightSource(tmp_path) as source, pytest.raises(ValueError, match=complaint):
        DeepseekModel.load(source, config)
    with WeightSource(tmp_path) as source:
        assert DeepseekModel.load(source, config, with_mtp=False).mtp is None
    with WeightSource(MINNOW) as source:  # left out on purpose: its tensors are not "unexpected"
        without = DeepseekModel.load(source, config, with_mtp=False)
    assert without.mtp is None
    assert without.kv_spec.num_layers == 5
