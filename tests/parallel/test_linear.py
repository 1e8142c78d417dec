"""Every storage form gives the same product, and refuses what it cannot hold."""

from __future__ import annotations

import pytest
import torch

from parallel.linear import HalfLinear, PackedLinear, PlainLinear, build_linear
from parallel.norm import RmsNorm


def random_weight(out_features: int, in_features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    # bfloat16 values, as checkpoints hold them: float16 keeps nearly all of them exactly
    return (torch.randn(out_features, in_features, generator=generator) * in_features**-0.5).bfloat16().float()


@pytest.mark.parametrize("num_rows", [1, 2, 8, 33])
@pytest.mark.parametrize("form", ["plain", "packed", "half"])
def test_forms_agree(form: str, num_rows: int) -> None:
    weight = random_weight(300, 70)
    x = torch.randn(num_rows, 70, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        linear = {"plain": PlainLinear, "packed": PackedLinear, "half": lambda w: HalfLinear(w, "w")}[form](weight)
        assert (linear.in_features, linear.out_features) == (70, 300)
        assert torch.allclose(linear(x), x @ weight.t(), atol=2e-5)


@pytest.mark.parametrize("storage", ["auto", "float32", "float16"])
@pytest.mark.parametrize("shape", [(8, 6), (700, 300), (1000, 900), (1, 5)])
def test_the_source_weight_may_be_overwritten_afterwards(storage: str, shape: tuple[int, int]) -> None:
    weight = random_weight(*shape)
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1))
    expected = x @ weight.t()
    with torch.inference_mode():
        linear = build_linear(weight, storage, "w")  # type: ignore[arg-type]
        weight.fill_(torch.nan)
        assert torch.allclose(linear(x), expected, atol=2e-5)


def test_forms_are_chosen_by_size_and_storage() -> None:
    large, small = torch.zeros(1000, 1000), torch.zeros(10, 10)
    assert isinstance(build_linear(large, "auto", "w"), HalfLinear)
    assert isinstance(build_linear(large, "float16", "w"), HalfLinear)
    assert isinstance(build_linear(large, "float32", "w"), PackedLinear)
    assert isinstance(build_linear(small, "float16", "w"), PlainLinear)


@pytest.mark.parametrize("value", [65_505.0, -70_000.0])
def test_float16_overflow_is_named(value: float) -> None:
    weight = torch.zeros(1000, 1000)
    weight[3, 4] = value
    with pytest.raises(ValueError, match=r"model\.big\.weight: largest value 6|model\.big\.weight: largest value 7"):
        build_linear(weight, "auto", "model.big.weight")
    assert isinstance(build_linear(weight, "float32", "model.big.weight"), PackedLinear)


def test_unknown_storage_is_refused() -> None:
    with pytest.raises(ValueError, match="storage = 'int8'"):
        build_linear(torch.zeros(2, 2), "int8", "w")  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 40, generator=generator) * scale
    weight = torch.rand(24, generator=generator)
    x = wide[:, 8:32]  # a strided view
    expected = x / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    assert torch.allclose(RmsNorm(weight, 1e-6)(x), expected.float(), rtol=1e-5, atol=1e-7)
    assert torch.equal(RmsNorm(weight, 1e-6)(torch.zeros(2, 24)), torch.zeros(2, 24))
