"""A decoder layer as a short list of stages, so that two halves of a step can be interleaved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe.experts import GatedMlp
from moe.layer import MoeLayer, MoeState
from parallel.group import Group
from parallel.norm import RmsNorm
from parallel.tokens import gather_tokens, reduce_scatter_tokens
from runtime.attention.mla_pass import MlaPass


class Attention(Protocol):
    def __call__(self, hidden: Tensor, prepared: MlaPass, kv: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, hidden_size]: this rank's share of the sum over tp; writes one layer's `kv`."""


@dataclass(slots=True)
class HalfState:
    """One half of a step (or the whole of it) on its way through the layers.

    The half's n = num_tokens tokens are scattered over tp: this rank keeps ceil(n / tp), padded at the end.
    """

    hidden: Tensor  # [ceil(n / tp), hidden_size], the residual stream; updated in place
    num_tokens: int
    prepared: MlaPass  # of all n tokens
    kv: list[Tensor]  # per layer [num_pages, page_size, latent_width]
    dummy: Tensor | None  # [ceil(n / tp)] bool: tokens for no expert (dummy rows, padding); None: there are none
    moe: MoeState | None = None
    capacity: int | None = None  # rows that every rank pads to in a dispatch of fixed shape: >= ceil(n / tp) anywhere


Stage = Callable[[HalfState], None]


class DecoderLayer:
    """Attention and feed-forward part; `kv_idx` is the layer's place in the list of caches.

    `stages`: attention and routing | dispatch send, shared expert | dispatch recv, experts, combine send |
    combine recv, or attention | mlp. Running them in order on one state is the layer. `trailing_stages` are the same
    for half B of two, which runs its shared expert before it sends: B's counts are then still on the way.

    An exchange over ep starts at the end of one stage and is waited for at the beginning of the next, so that between
    the two there is always a stage of the other half (runtime/overlap.py). The exchanges over tp stay inside a stage:
    they are within one node and brief, and splitting attention from routing for them would leave the counts, which
    cross nodes, with nothing to hide behind.
    """

    def __init__(
        self,
        *,
        kv_idx: int,
        tp: Group,
        attention_norm: RmsNorm,
        attention: Attention,
        mlp_norm: RmsNorm,
        mlp: GatedMlp | MoeLayer,
    ) -> None:
        self._kv_idx, self._tp = kv_idx, tp
        self._attention_norm, self._attention, self._mlp_norm = attention_norm, attention, mlp_norm
        self.stages: tuple[Stage, ...]
        self.trailing_stages: tuple[Stage, ...]
        if isinstance(mlp, MoeLayer):
            moe = _MoeStages(mlp)
            self.stages = self._route(mlp), moe.send_then_share, moe.run_experts, moe.combine_recv
            self.trailing_stages = self.stages[0], moe.share_then_send, *self.stages[2:]
        else:
            self.stages = self.trailing_stages = self.attend, self._run_dense(mlp)

    def run(self, state: HalfState) -> None:
        for stage in self.stages:
            stage(state)

    def attend(self, state: HalfState) -> None:
        def attention(normed: Tensor) -> Tensor:
            return self._attention(normed, state.prepared, state.kv[self._kv_idx])

        self._add_partial(state, self._attention_norm(state.hidden), attention)

    def _add_partial(self, state: HalfState, normed: Tensor, module: Callable[[Tensor], Tensor]) -> None:
        """Runs a module that is split over tp on all tokens, and adds its sum to this rank's tokens."""
        full = gather_tokens(self._tp, normed, state.num_tokens)  # [num_tokens, hidden_size]
        partial = module(full) if state.num_tokens else full
        state.hidden.add_(reduce_scatter_tokens(self._tp, partial))

    def _run_dense(self, mlp: GatedMlp) -> Stage:
        def run_dense(state: HalfState) -> None:
            self._add_partial(state, self._mlp_norm(state.hidden), mlp)

        return run_dense

    def _route(self, layer: MoeLayer) -> Stage:
        def attend_and_route(state: HalfState) -> None:
            self.attend(state)
            state.moe = layer.route(self._mlp_norm(state.hidden), state.dummy, state.capacity)

        return attend_and_route


class _MoeStages:
    """What follows routing, on a half's state."""

    def __init__(self, layer: MoeLayer) -> None:
        self._layer = layer

    def send_then_share(self, state: HalfState) -> None:
        assert state.moe is not None
        self._layer.dispatch_send(state.moe)
        self._layer.run_shared(state.moe)

    def share_then_send(self, state: HalfState) -> None:
        assert state.moe is not None
        self._layer.run_shared(state.moe)
        self._layer.dispatch_send(state.moe)

    def run_experts(self, state: HalfState) -> None:
        assert state.moe is not None
        self._layer.run_experts(state.moe)
        self._layer.combine_send(state.moe)  # at once: results travel during the other half's experts

    def combine_recv(self, state: HalfState) -> None:
        assert state.moe is not None
        state.hidden.add_(self._layer.combine_recv(state.moe))
        state.moe = None
