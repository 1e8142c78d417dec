"""Matrix products with fixed weights, stored in the form that is fastest for the few rows of a decode step."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Storage = Literal["auto", "float32", "float16"]

FLOAT16_MAX = 65504.0
# Below these the fixed cost of the packed products (15 to 30 us) exceeds what they save.
HALF_MIN_ELEMENTS = 100_000
PACK_MIN_ELEMENTS = 800_000
# Row count oneDNN is told to expect when it chooses its layout: a verification batch, not a prompt.
PACK_ROWS_HINT = 8


class Linear(Protocol):
    """`x @ weight.T` for `x` [num_rows, in_features], giving a new float32 [num_rows, out_features]."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """The weight as it is; for small weights and for devices other than the CPU."""

    __slots__ = ("in_features", "out_features", "weight_t")

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        # [in_features, out_features], the faster order for one row; a copy, since `weight` may be a scratch buffer.
        self.weight_t = weight.t().clone(memory_format=torch.contiguous_format)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight_t)

    def weight(self) -> Tensor:
        return self.weight_t.t()


class PackedLinear:
    """float32 in oneDNN's blocked layout: half the time of a plain product for 2 to 16 rows."""

    __slots__ = ("_packed", "in_features", "out_features")

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS_HINT)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return out

    def weight(self) -> Tensor:
        dense: Tensor = self._packed.to_dense()
        return dense


class HalfLinear:
    """float16 weights in FBGEMM's layout, float32 arithmetic: half the bytes a step has to read.

    Raises ValueError naming the weight when a value does not fit float16.
    """

    __slots__ = ("_packed", "in_features", "out_features")

    def __init__(self, weight: Tensor, name: str) -> None:
        self.out_features, self.in_features = weight.shape
        low, high = torch.aminmax(weight)
        largest = max(-low.item(), high.item())
        if not largest <= FLOAT16_MAX:
            raise ValueError(
                f"{name}: largest value {largest:g} does not fit float16 (limit {FLOAT16_MAX:g}); use storage = float32"
            )
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out

    def weight(self) -> Tensor:
        unpacked: Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return unpacked


def build_linear(weight: Tensor, storage: Storage, name: str) -> Linear:
    """Choose the form for `weight` [out_features, in_features] float32; the form is settled here, once.

    "auto" stores large weights as float16 where the CPU has the products for it; all others are float32.
    `weight` is copied; `name` appears in errors. Raises ValueError for an unknown storage or when float16 overflows.
    """
    if storage not in ("auto", "float32", "float16"):
        raise ValueError(f"storage = {storage!r}: expected auto, float32 or float16")
    on_cpu, size = weight.device.type == "cpu", weight.numel()
    has_half = "fbgemm" in torch.backends.quantized.supported_engines
    if storage == "float16" and not (on_cpu and has_half):
        raise ValueError("storage = float16 needs a CPU with FBGEMM (x86 with AVX2); use auto or float32")
    if on_cpu and has_half and storage != "float32" and size >= HALF_MIN_ELEMENTS:
        return HalfLinear(weight, name)
    if on_cpu and storage == "float32" and size >= PACK_MIN_ELEMENTS and torch._C._has_mkldnn:
        return PackedLinear(weight)
    return PlainLinear(weight)


def stored_weight(linear: Linear) -> Tensor:
    """[out_features, in_features] float32: the values that `linear` multiplies with, which `build_linear` takes back
    without loss. For moving a weight to another rank, not for computing with it."""
    assert isinstance(linear, PlainLinear | PackedLinear | HalfLinear), type(linear)
    return linear.weight().float()
