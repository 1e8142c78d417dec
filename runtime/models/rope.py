"""Rotary position embedding as unit complex numbers, plain or stretched by YaRN (arXiv:2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """`factor=None` is plain rotation; otherwise YaRN stretches `original_max_positions` by `factor`."""

    theta: float
    factor: float | None = None
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


def softmax_scale(config: RopeConfig, qk_head_dim: int) -> float:
    """Factor on attention scores: 1 / sqrt(qk_head_dim), times mscale squared under YaRN."""
    scale: float = qk_head_dim**-0.5
    if config.factor is not None and config.mscale_all_dim:
        scale *= _mscale(config.factor, config.mscale_all_dim) ** 2
    return scale


def rotation_table(config: RopeConfig, dim: int, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions, dim / 2] complex64: what the interleaved pairs at each position are multiplied with."""
    frequencies, length = _frequencies(config, dim)
    # float32 like the reference implementations, so that large angles round as theirs do.
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.complex(angles.cos() * length, angles.sin() * length).to(device)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate interleaved pairs in place and return `x`.

    x: [..., rope_dim], a view with even strides; rotation: complex64, broadcasts to [..., rope_dim / 2].
    """
    pairs = x.view(*x.shape[:-1], x.shape[-1] // 2, 2)
    torch.view_as_complex(pairs).mul_(rotation)
    return x


def _frequencies(config: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """([dim / 2] radians per position, length of the rotation vector)."""
    powers = config.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / powers
    if config.factor is None:
        return plain, 1.0
    stretched = 1.0 / (config.factor * powers)
    low, high = _correction_range(config, dim)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp  # share of the unstretched frequency: fast pairs keep theirs
    return stretched * (1 - keep) + plain * keep, _vector_length(config)


def _correction_range(config: RopeConfig, dim: int) -> tuple[float, float]:
    def pair_of(num_rotations: float) -> float:
        return dim * math.log(config.original_max_positions / (num_rotations * 2 * math.pi)) / (
            2 * math.log(config.theta)
        )

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def _vector_length(config: RopeConfig) -> float:
    assert config.factor is not None
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
