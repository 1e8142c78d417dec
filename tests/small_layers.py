"""Small decoder layers, whole or as one rank's share, with an attention that depends on every earlier token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from moe.dispatcher import Dispatched, Dispatcher
from moe.experts import GatedMlp, GroupedExperts
from moe.layer import MoeLayer
from moe.router import Router, RouterConfig
from parallel.group import Group
from parallel.linear import PlainLinear
from parallel.norm import RmsNorm
from runtime.attention.mla_pass import MlaPass
from runtime.models.decoder import DecoderLayer, HalfState

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 16, 12, 8, 3
CONFIG = RouterConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, scoring="sigmoid", method="noaux_tc")


@dataclass(frozen=True)
class MlpWeights:
    gate: Tensor  # [width, HIDDEN]
    up: Tensor  # [width, HIDDEN]
    down: Tensor  # [HIDDEN, width]

    def part(self, rank: int, size: int) -> GatedMlp:
        """Rank's share of the inner values: what it returns is a partial sum."""
        n = self.gate.shape[0] // size
        here = slice(rank * n, (rank + 1) * n)
        return GatedMlp(
            PlainLinear(torch.cat((self.gate[here], self.up[here]))), PlainLinear(self.down[:, here].contiguous())
        )


class LayerWeights:
    """Everything of one layer. `bias` [NUM_EXPERTS] steers which experts are chosen."""

    def __init__(self, seed: int, bias: Tensor | None = None) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.router = self._random(NUM_EXPERTS, HIDDEN)
        self.bias = torch.zeros(NUM_EXPERTS) if bias is None else bias
        self.experts = [self._mlp(WIDTH) for _ in range(NUM_EXPERTS)]
        self.shared, self.dense = self._mlp(WIDTH), self._mlp(2 * WIDTH)
        self.mix = self._random(HIDDEN, HIDDEN)
        self.norms = [1 + 0.1 * self._random(HIDDEN) for _ in range(2)]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * 0.3

    def _mlp(self, width: int) -> MlpWeights:
        return MlpWeights(self._random(width, HIDDEN), self._random(width, HIDDEN), self._random(HIDDEN, width))

    def local_experts(self, rank: int, size: int) -> GroupedExperts:
        n = NUM_EXPERTS // size
        return GroupedExperts([weights.part(0, 1) for weights in self.experts[rank * n : (rank + 1) * n]])

    def moe(self, ep: Group, dispatcher: Dispatcher, *, shared: bool = True) -> MoeLayer:
        router = Router(CONFIG, self.router, self.bias)
        experts = self.local_experts(ep.rank, ep.size)
        return MoeLayer(router, dispatcher, experts, self.shared.part(0, 1) if shared else None)

    def decoder(self, kv_idx: int, tp: Group, moe: MoeLayer | None) -> DecoderLayer:
        """With a dense feed-forward part when `moe` is None."""
        return DecoderLayer(
            kv_idx=kv_idx, tp=tp, attention_norm=RmsNorm(self.norms[0], 1e-6),
            attention=MeanAttention(self.mix, tp), mlp_norm=RmsNorm(self.norms[1], 1e-6),
            mlp=self.dense.part(tp.rank, tp.size) if moe is None else moe,
        )


@dataclass(frozen=True)
class Placed:
    """Stands in for an attention pass: where the half's tokens lie in the cache."""

    start: int


class MeanAttention:
    """Each token gets `mix` times the mean of all entries up to its own; ranks of `tp` share the columns of `mix`.

    The cache is [capacity, HIDDEN]; an entry that was not written yet is NaN and spoils whoever reads it.
    """

    def __init__(self, mix: Tensor, tp: Group) -> None:
        n = HIDDEN // tp.size
        self._here = slice(tp.rank * n, (tp.rank + 1) * n)
        self._mix_t = mix[:, self._here].t()  # [HIDDEN / tp, HIDDEN]

    def __call__(self, hidden: Tensor, prepared: MlaPass, kv: Tensor) -> Tensor:
        start = cast(Placed, prepared).start
        stop = start + hidden.shape[0]
        kv[start:stop] = hidden
        means = kv[:stop].cumsum(0) / torch.arange(1, stop + 1).unsqueeze(1)  # [stop, HIDDEN]
        return means[start:, self._here] @ self._mix_t


def empty_caches(num_layers: int, num_tokens: int) -> list[Tensor]:
    return [torch.full((num_tokens, HIDDEN), torch.nan) for _ in range(num_layers)]


def half(
    local: Tensor, num_tokens: int, start: int, kv: list[Tensor], dummy: Tensor | None, capacity: int | None = None
) -> HalfState:
    """local: [ceil(num_tokens / tp), HIDDEN], overwritten; its tokens lie in the cache from `start` on."""
    return HalfState(local, num_tokens, cast(MlaPass, Placed(start)), kv, dummy, capacity=capacity)


def run_moe(layer: MoeLayer, hidden: Tensor, dummy: Tensor | None = None, capacity: int | None = None) -> Tensor:
    """All stages of one layer on one half."""
    state = layer.route(hidden, dummy, capacity)
    layer.dispatch_send(state)
    layer.run_shared(state)
    layer.run_experts(state)
    layer.combine_send(state)
    return layer.combine_recv(state)


def received(dispatched: Dispatched, num_local_experts: int) -> list[tuple[list[float], list[tuple[int, float]]]]:
    """Per row its hidden values, and (local expert, weight) of each route that is not to none."""
    rows = []
    routing = dispatched.routing
    for hidden, ids, weights in zip(
        dispatched.hidden.tolist(), routing.expert_ids.tolist(), routing.weights.tolist(), strict=True
    ):
        routes = zip(ids, weights, strict=True)
        rows.append((hidden, sorted((e, w) for e, w in routes if e < num_local_experts)))
    return rows
