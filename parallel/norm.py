"""Root-mean-square norm written in few operations: small models are bound by the number of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    weight: [dim] float32. `x` may have any leading shape and be a strided view; the result is a new tensor.
    """

    __slots__ = ("_eps_length", "_gain")

    def __init__(self, weight: Tensor, eps: float) -> None:
        # x / sqrt(mean + eps) = sqrt(dim) * x / hypot(|x|, sqrt(dim * eps)): the root goes into the gain.
        dim = weight.shape[0]
        self._gain = weight * math.sqrt(dim)  # [dim]
        self._eps_length = torch.full((1,), math.sqrt(dim * eps), device=weight.device)  # [1]

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
        return torch.div(x, torch.hypot(length, self._eps_length)).mul_(self._gain)  # [..., dim]
