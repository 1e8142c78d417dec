"""The placement that a deployment starts with: ranks and controller work it out alike from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe.balance import initial_placement
from moe.placement import Placement, check_counts, load_placement
from runtime.config import EngineConfig
from runtime.models.config import ModelConfig, load_model_config
from runtime.models.shards import check_layout


def moe_layers(model: ModelConfig, *, with_mtp: bool) -> list[int]:
    """The model's numbers of its layers with experts; the MTP layer is the last."""
    return list(range(model.num_dense_layers, model.num_hidden_layers + with_mtp))


def first_placement(config: EngineConfig, model: ModelConfig) -> Placement | None:
    """None where experts have fixed places. Raises ValueError or FileNotFoundError naming the key that does not fit."""
    if not config.places_experts:
        return None
    layers, num_ranks = moe_layers(model, with_mtp=config.k > 0), config.layout.ep
    if not layers:
        raise ValueError(f"redundant_experts = {config.redundant_experts}: {config.model} has no layer with experts")
    num_slots = check_counts(model.num_experts, config.redundant_experts, num_ranks)
    if config.placement_file is not None:
        return load_placement(Path(config.placement_file), layers, model.num_experts, num_ranks, num_slots)
    return initial_placement(layers, model.num_experts, num_ranks, num_slots)


def check_fits(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError or FileNotFoundError, in one line, when the ranks of `config` cannot share the model."""
    check_layout(model, config.layout, config.redundant_experts)
    first_placement(config, model)


def even_nodes(node_of_rank: Sequence[int]) -> int | None:
    """Ranks of each node where all have as many and those of a node follow one another, else None."""
    size = list(node_of_rank).count(node_of_rank[0]) if node_of_rank else 0
    blocks = [set(node_of_rank[begin : begin + size]) for begin in range(0, len(node_of_rank), size or 1)]
    even = size > 0 and len(node_of_rank) % size == 0 and all(len(block) == 1 for block in blocks)
    return size if even and len(set.union(*blocks)) == len(blocks) else None


def load_bytes(config: EngineConfig) -> int:
    """Of what a rank tells about its experts at a time: a count an expert, a checksum a slot; 0 with fixed places."""
    if not config.places_experts:
        return 0
    model = load_model_config(config.model)
    num_layers = len(moe_layers(model, with_mtp=config.k > 0))
    return 1024 + 8 * num_layers * (2 * model.num_experts + config.redundant_experts)
