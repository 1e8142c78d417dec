"""An expert taken apart and put together again is the same to the last bit in every form; its checksum knows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe.experts import GatedMlp
from parallel.linear import HalfLinear, PackedLinear, PlainLinear, Storage, build_linear, stored_weight
from runtime.models.config import ModelConfig, load_model_config
from runtime.models.expert_weights import fingerprint, from_values, num_values, values_of

MINNOW = Path(__file__).parents[3] / "configs" / "minnow"
CPU = torch.device("cpu")


def sized(width: int, hidden: int) -> ModelConfig:
    return replace(load_model_config(MINNOW), moe_intermediate_size=width, hidden_size=hidden)


def make(config: ModelConfig, storage: Storage, seed: int = 0) -> GatedMlp:
    generator = torch.Generator().manual_seed(seed)
    width, hidden = config.moe_intermediate_size, config.hidden_size

    def weight(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=generator)

    gate_up = build_linear(weight(2 * width, hidden), storage, "gate_up")
    return GatedMlp(gate_up, build_linear(weight(hidden, width), storage, "down"))


@pytest.mark.parametrize(
    ("storage", "size", "form"),
    [
        ("float32", (8, 24), PlainLinear), ("auto", (8, 24), PlainLinear), ("auto", (256, 512), HalfLinear),
        ("float16", (256, 512), HalfLinear), ("float32", (1024, 1024), PackedLinear),
    ],
)
def test_there_and_back(storage: Storage, size: tuple[int, int], form: type) -> None:
    config = sized(*size)
    mlp = make(config, storage)
    assert isinstance(mlp.gate_up, form)
    values = values_of(mlp)
    assert values.shape == (num_values(config),)
    again = from_values(values, CPU, storage, "expert", config)
    assert isinstance(again.gate_up, form)
    hidden = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(9))
    assert torch.equal(again(hidden), mlp(hidden))
    assert torch.equal(values_of(again), values)
    assert fingerprint(again) == fingerprint(mlp)


def test_stored_weights_are_what_was_given() -> None:
    weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    assert torch.equal(stored_weight(build_linear(weight, "float32", "w")), weight)
    large = torch.randn(900, 900, generator=torch.Generator().manual_seed(2))
    assert torch.equal(stored_weight(build_linear(large, "float32", "w")), large)
    assert torch.equal(stored_weight(build_linear(large, "float16", "w")), large.half().float())


def test_the_fingerprint_tells_any_change() -> None:
    config = sized(64, 192)  # more than one piece of what a checksum covers
    values = values_of(make(config, "float32"))
    pieces = values.view(-1, 64)

    def found(changed: Tensor) -> int:
        return fingerprint(from_values(changed.reshape(-1), CPU, "float32", "expert", config))

    seen = {found(values)}
    for index in (0, 17_000, len(values) - 1):
        other = values.clone()
        other[index] += 1e-3
        seen.add(found(other))
    seen.add(found(pieces.flip(0)))  # the same values in other places
    seen.add(fingerprint(make(config, "float32", seed=1)))
    assert len(seen) == 6
    assert found(values.clone()) in seen
