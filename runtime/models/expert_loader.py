"""Builds MoE layers with this rank's experts; each expert lives whole on one rank."""

from __future__ import annotations

from concurrent.futures import Executor

import torch

from moe.dispatcher import Dispatcher
from moe.experts import DENSE_MAX_ELEMENTS, DenseExperts, Experts, GatedMlp, GroupedExperts, SmallExperts
from moe.layer import MoeLayer
from moe.router import Router
from runtime.models.config import ModelConfig
from runtime.models.part_reader import PartReader
from runtime.models.shards import Part, Shards


class ExpertLoader:
    """`pool` packs experts beside each other; the caller ends it."""

    def __init__(
        self, reader: PartReader, config: ModelConfig, shards: Shards, dispatcher: Dispatcher, pool: Executor
    ) -> None:
        self._reader, self._config, self._shards = reader, config, shards
        self._dispatcher, self._pool = dispatcher, pool

    def moe(self, prefix: str) -> MoeLayer:
        config = self._config
        assert config.router is not None
        gate = self._reader.values(f"{prefix}.gate.weight", (config.num_experts, config.hidden_size))
        bias = None
        if config.router.method == "noaux_tc":
            bias = self._reader.values(f"{prefix}.gate.e_score_correction_bias", (config.num_experts,))
        router = Router(config.router, gate, bias)
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

    def _leave_experts(self, prefix: str, own: range) -> None:
        """What other ranks read must be there too: every rank refuses a checkpoint that lacks an expert."""
        others = [idx for idx in range(self._config.num_experts) if idx not in own]
        for idx in others:
            for part in self._mlp_parts(f"{prefix}.experts.{idx}", self._config.moe_intermediate_size):
                self._reader.source.leave(part.name, part.shape)

    def _shared_expert(self, prefix: str) -> GatedMlp | None:
        count = self._config.num_shared_experts
        return self._mlp(f"{prefix}.shared_experts", self._config.moe_intermediate_size * count) if count else None

    def _grouped_experts(self, prefix: str, own: range) -> GroupedExperts:
        def expert(idx: int) -> GatedMlp:
            with torch.inference_mode():  # a thread's own setting
                return self._mlp(f"{prefix}.experts.{idx}", self._config.moe_intermediate_size)

        # Packing is single-threaded inside and dominates loading; experts are independent.
        return GroupedExperts(list(self._pool.map(expert, own)))

    def _dense_experts(self, prefix: str, own: range, num_blocks: int) -> DenseExperts:
        """`own` experts in one weight, and the shared expert behind them when there are more blocks than those."""
        width, hidden = self._config.moe_intermediate_size, self._config.hidden_size
        gate_up = torch.empty(2, num_blocks * width, hidden)
        down = torch.empty(hidden, num_blocks * width)
        places = [(f"{prefix}.experts.{e}", i * width, (i + 1) * width) for i, e in enumerate(own)]
        if num_blocks > len(own):
            places.append((f"{prefix}.shared_experts", len(own) * width, num_blocks * width))
        for name, begin, end in places:
            gate_part, up_part, down_part = self._mlp_parts(name, end - begin)
            self._reader.take_into(gate_up[0, begin:end], gate_part)
            self._reader.take_into(gate_up[1, begin:end], up_part)
            self._reader.take_into(down[:, begin:end], down_part)
        gate_up_proj = self._reader.build(gate_up.flatten(0, 1), f"{prefix}.experts.*.gate_proj.weight")
        down_proj = self._reader.build(down, f"{prefix}.experts.*.down_proj.weight")
        return DenseExperts(gate_up_proj, down_proj, len(own), width, self._reader.device)

    def _mlp(self, prefix: str, width: int) -> GatedMlp:
        """An expert, on whichever rank it lives."""
        gate, up, down = self._mlp_parts(prefix, width)
        return GatedMlp(self._reader.linear(gate, up), self._reader.linear(down))

    def _mlp_parts(self, prefix: str, width: int) -> tuple[Part, Part, Part]:
        whole, hidden = self._shards.whole, self._config.hidden_size
        return (
            whole(f"{prefix}.gate_proj.weight", width, hidden),
            whole(f"{prefix}.up_proj.weight", width, hidden),
            whole(f"{prefix}.down_proj.weight", hidden, width),
        )
