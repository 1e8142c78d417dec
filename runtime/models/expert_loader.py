"""Builds MoE layers with this rank's experts; each expert lives whole on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import torch

from moe.dispatcher import Dispatcher
from moe.experts import DENSE_MAX_ELEMENTS, DenseExperts, Experts, GatedMlp, GroupedExperts, SmallExperts
from moe.layer import MoeLayer
from moe.placed import PlacedLayer
from moe.placement import Placement
from moe.replicas import replica_table
from moe.router import Router
from runtime.models.config import ModelConfig
from runtime.models.expert_weights import expert_name, fingerprint, mlp_parts, read_mlp
from runtime.models.part_reader import PartReader
from runtime.models.shards import Shards


class ExpertLoader:
    """`pool` packs experts beside each other; the caller ends it.

    With a `placement` it says which experts this rank holds, else each rank holds a block of them. `placed` and
    `fingerprints` (layer and expert) are what a placement has brought here.
    """

    def __init__(
        self, reader: PartReader, config: ModelConfig, shards: Shards, dispatcher: Dispatcher, pool: Executor,
        placement: Placement | None = None, ranks_per_node: int = 1,
    ) -> None:
        self._reader, self._config, self._shards = reader, config, shards
        self._dispatcher, self._pool = dispatcher, pool
        self._placement, self._ranks_per_node = placement, ranks_per_node
        self.placed: dict[int, PlacedLayer] = {}
        self.fingerprints: dict[tuple[int, int], int] = {}

    def moe(self, layer: int, prefix: str) -> MoeLayer:
        config = self._config
        assert config.router is not None
        gate = self._reader.values(f"{prefix}.gate.weight", (config.num_experts, config.hidden_size))
        bias = None
        if config.router.method == "noaux_tc":
            bias = self._reader.values(f"{prefix}.gate.e_score_correction_bias", (config.num_experts,))
        router = Router(config.router, gate, bias)
        if self._placement is not None:
            placed = self._placed_experts(layer, prefix, self._placement)
            shared = self._shared_expert(prefix)
            return MoeLayer(router, self._dispatcher, placed.experts, shared, placed.replicas)
        experts, shared = self._experts(prefix)
        return MoeLayer(router, self._dispatcher, experts, shared)

    def _experts(self, prefix: str) -> tuple[Experts, GatedMlp | None]:
        """This rank's experts, and the shared one unless it is among them."""
        config = self._config
        own = self._shards.experts(config.num_experts)
        self._leave_experts(prefix, own)
        many, shared = self._grouped_experts(prefix, own), self._shared_expert(prefix)
        # The shared expert sees this rank's tokens, the others those that arrive: only on a single rank are they equal.
        joined = shared is not None and self._shards.groups.ep.size == 1
        num_blocks = len(own) + (config.num_shared_experts if joined else 0)
        if num_blocks * 3 * config.moe_intermediate_size * config.hidden_size > DENSE_MAX_ELEMENTS:
            return many, shared
        few = self._dense_experts(prefix, own, num_blocks)
        return (SmallExperts(few, many, shared), None) if joined else (SmallExperts(few, many, None), shared)

    def _placed_experts(self, layer: int, prefix: str, placement: Placement) -> PlacedLayer:
        """The experts of this rank's slots, in the form that can be exchanged one by one."""
        rank = self._shards.groups.ep.rank
        held = placement.experts[placement.index(layer), rank].tolist()
        own = list(dict.fromkeys(held))  # one that is here twice is read once
        self._leave_experts(prefix, own)
        mlps = dict(zip(own, self._read_experts(prefix, own), strict=True))
        self.fingerprints.update(
            zip(((layer, expert) for expert in own), self._pool.map(fingerprint, mlps.values()), strict=True)
        )
        table = replica_table(placement, layer, rank, self._ranks_per_node).to(self._reader.device)
        self.placed[layer] = PlacedLayer(held, [mlps[expert] for expert in held], table)
        return self.placed[layer]

    def _leave_experts(self, prefix: str, own: Sequence[int]) -> None:
        """What other ranks read must be there too: every rank refuses a checkpoint that lacks an expert."""
        others = [idx for idx in range(self._config.num_experts) if idx not in own]
        for idx in others:
            for part in mlp_parts(expert_name(prefix, idx), self._config):
                self._reader.source.leave(part.name, part.shape)

    def _shared_expert(self, prefix: str) -> GatedMlp | None:
        count = self._config.num_shared_experts
        return read_mlp(self._reader, f"{prefix}.shared_experts", self._config, count) if count else None

    def _grouped_experts(self, prefix: str, own: Sequence[int]) -> GroupedExperts:
        return GroupedExperts(self._read_experts(prefix, own))

    def _read_experts(self, prefix: str, own: Sequence[int]) -> list[GatedMlp]:
        def expert(idx: int) -> GatedMlp:
            with torch.inference_mode():  # a thread's own setting
                return read_mlp(self._reader, expert_name(prefix, idx), self._config)

        # Packing is single-threaded inside and dominates loading; experts are independent.
        return list(self._pool.map(expert, own))

    def _dense_experts(self, prefix: str, own: range, num_blocks: int) -> DenseExperts:
        """`own` experts in one weight, and the shared expert behind them when there are more blocks than those."""
        width, hidden = self._config.moe_intermediate_size, self._config.hidden_size
        gate_up = torch.empty(2, num_blocks * width, hidden)
        down = torch.empty(hidden, num_blocks * width)
        places = [(expert_name(prefix, e), i * width, (i + 1) * width) for i, e in enumerate(own)]
        if num_blocks > len(own):
            places.append((f"{prefix}.shared_experts", len(own) * width, num_blocks * width))
        for name, begin, end in places:
            gate_part, up_part, down_part = mlp_parts(name, self._config, (end - begin) // width)
            self._reader.take_into(gate_up[0, begin:end], gate_part)
            self._reader.take_into(gate_up[1, begin:end], up_part)
            self._reader.take_into(down[:, begin:end], down_part)
        gate_up_proj = self._reader.build(gate_up.flatten(0, 1), f"{prefix}.experts.*.gate_proj.weight")
        down_proj = self._reader.build(down, f"{prefix}.experts.*.down_proj.weight")
        return DenseExperts(gate_up_proj, down_proj, len(own), width, self._reader.device)
