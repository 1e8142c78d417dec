"""A decoder layer as a short list of stages, so that two halves of a step can be interleaved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from moe.experts import GatedMlp
from moe.layer import MoeLayer, MoeState
from parallel.norm import RmsNorm
from runtime.attention.mla import MlaAttention
from runtime.attention.mla_pass import MlaPass


@dataclass(slots=True)
class HalfState:
    """One half of a step (or the whole of it) on its way through the layers."""

    hidden: Tensor  # [num_tokens, hidden_size], the residual stream; updated in place
    prepared: MlaPass
    kv: list[Tensor]  # per layer [num_pages, page_size, latent_width]
    dummy: Tensor | None  # [num_tokens] bool
    moe: MoeState | None = None


Stage = Callable[[HalfState], None]


class DecoderLayer:
    """Attention and feed-forward part; `kv_idx` is the layer's place in the list of caches.

    `stages`: attention | dispatch send | dispatch recv + experts | combine send | combine recv, or attention | mlp.
    Running them in order on one state is the layer.
    """

    def __init__(
        self,
        *,
        kv_idx: int,
        attention_norm: RmsNorm,
        attention: MlaAttention,
        mlp_norm: RmsNorm,
        mlp: GatedMlp | MoeLayer,
    ) -> None:
        self._kv_idx = kv_idx
        self._attention_norm, self._attention, self._mlp_norm = attention_norm, attention, mlp_norm
        self.stages: tuple[Stage, ...] = (self.attend, *_feed_forward(mlp_norm, mlp))

    def run(self, state: HalfState) -> None:
        for stage in self.stages:
            stage(state)

    def attend(self, state: HalfState) -> None:
        normed = self._attention_norm(state.hidden)
        state.hidden.add_(self._attention(normed, state.prepared, state.kv[self._kv_idx]))


def _feed_forward(norm: RmsNorm, mlp: GatedMlp | MoeLayer) -> tuple[Stage, ...]:
    if isinstance(mlp, MoeLayer):
        stages = MoeStages(norm, mlp)
        return stages.dispatch_send, stages.run_experts, stages.combine_send, stages.combine_recv
    dense = mlp

    def run_dense(state: HalfState) -> None:
        state.hidden.add_(dense(norm(state.hidden)))

    return (run_dense,)


class MoeStages:
    """The stages of a MoE layer on a half's state."""

    def __init__(self, norm: RmsNorm, layer: MoeLayer) -> None:
        self._norm, self._layer = norm, layer

    def dispatch_send(self, state: HalfState) -> None:
        state.moe = self._layer.dispatch_send(self._norm(state.hidden), state.dummy)

    def run_experts(self, state: HalfState) -> None:
        assert state.moe is not None
        self._layer.run_experts(state.moe)

    def combine_send(self, state: HalfState) -> None:
        assert state.moe is not None
        self._layer.combine_send(state.moe)

    def combine_recv(self, state: HalfState) -> None:
        assert state.moe is not None
        state.hidden.add_(self._layer.combine_recv(state.moe))
        state.moe = None
