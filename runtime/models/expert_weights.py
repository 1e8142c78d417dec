"""One expert's weights: read from the checkpoint, taken apart into plain values, put together again, and recognised."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe.experts import GatedMlp
from parallel.linear import Storage, build_linear, stored_weight
from runtime.checksum import MASK, checksum
from runtime.models.config import ModelConfig
from runtime.models.part_reader import PartReader
from runtime.models.shards import Part

_PIECE = 1 << 16  # bytes that one checksum covers
_MIX = 0x9E3779B97F4A7C15  # odd: what changes places changes the fingerprint


def layer_prefix(layer: int) -> str:
    """Of the tensors of an MoE layer, by the model's number of it."""
    return f"model.layers.{layer}.mlp"


def expert_name(prefix: str, expert: int) -> str:
    return f"{prefix}.experts.{expert}"


def mlp_parts(name: str, config: ModelConfig, num_blocks: int = 1) -> tuple[Part, Part, Part]:
    """Gate, up and down of an expert, whole; `num_blocks` times as wide for a shared expert of that many."""
    width, hidden = num_blocks * config.moe_intermediate_size, config.hidden_size
    return (
        _whole(f"{name}.gate_proj.weight", width, hidden), _whole(f"{name}.up_proj.weight", width, hidden),
        _whole(f"{name}.down_proj.weight", hidden, width),
    )


def read_mlp(reader: PartReader, name: str, config: ModelConfig, num_blocks: int = 1) -> GatedMlp:
    """An expert, on whichever rank it lives."""
    gate, up, down = mlp_parts(name, config, num_blocks)
    return GatedMlp(reader.linear(gate, up), reader.linear(down))


def num_values(config: ModelConfig) -> int:
    """Of one routed expert."""
    return 3 * config.moe_intermediate_size * config.hidden_size


def values_of(mlp: GatedMlp) -> Tensor:
    """[num_values] float32: gate, up and down one after the other, as they are multiplied with."""
    return torch.cat((stored_weight(mlp.gate_up).reshape(-1), stored_weight(mlp.down).reshape(-1)))


def from_values(
    values: Tensor, device: torch.device, storage: Storage, name: str, config: ModelConfig
) -> GatedMlp:
    """The inverse of `values_of`; the values are copied, `name` appears in errors."""
    width, hidden = config.moe_intermediate_size, config.hidden_size
    gate_up, down = torch.split(values.to(device), [2 * width * hidden, hidden * width])
    return GatedMlp(
        build_linear(gate_up.view(2 * width, hidden), storage, f"{name}.gate_proj.weight"),
        build_linear(down.view(hidden, width), storage, f"{name}.down_proj.weight"),
    )


def fingerprint(mlp: GatedMlp) -> int:
    """64 bits over the values that the expert multiplies with, the same wherever they came from."""
    data = values_of(mlp).cpu().contiguous().numpy().view(np.uint8).data
    total = len(data)
    for begin in range(0, len(data), _PIECE):
        total = (total * _MIX + checksum(data[begin : begin + _PIECE], begin)) & MASK
    return total


def _whole(name: str, rows: int, cols: int) -> Part:
    return Part(name=name, shape=(rows, cols), rows=slice(0, rows), cols=slice(0, cols))
