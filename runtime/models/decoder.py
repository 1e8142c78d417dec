"""A decoder layer as a short list of stages, so that two halves of a step can be interleaved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


class Part(NamedTuple):
    """A piece of a stage, by the name that a trace shows."""

    name: str
    run: Callable[[HalfState], None]


Stage = tuple[Part, ...]


class DecoderLayer:
    """Attention and feed-forward part; `kv_idx` is the layer's place in the list of caches.

    `stages` in order on one state are the layer: attention | mlp, or attention, routing, dispatch | shared expert,
    experts, results sent back | results added. `trailing_stages` are those of half B of two.

    An exchange over ep starts at the end of one stage and is waited for at the beginning of a later one, so that
    between the two there is always a stage of the other half (runtime/overlap.py). The exchanges over tp stay inside a
    stage: they are within one node and brief, and splitting attention from routing for them would leave what travels
    next, which crosses nodes, with nothing to hide behind.
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
        attend = Part("attention", self.attend)
        if isinstance(mlp, MoeLayer):
            self.stages, self.trailing_stages = _MoeParts(mlp).stages(attend, Part("routing", self._route(mlp)))
        else:
            self.stages = self.trailing_stages = (attend,), (Part("mlp", self._run_dense(mlp)),)

    def attend(self, state: HalfState) -> None:
        def attention(normed: Tensor) -> Tensor:
            return self._attention(normed, state.prepared, state.kv[self._kv_idx])

        self._add_partial(state, self._attention_norm(state.hidden), attention)

    def _add_partial(self, state: HalfState, normed: Tensor, module: Callable[[Tensor], Tensor]) -> None:
        """Runs a module that is split over tp on all tokens, and adds its sum to this rank's tokens."""
        full = gather_tokens(self._tp, normed, state.num_tokens)  # [num_tokens, hidden_size]
        partial = module(full) if state.num_tokens else full
        state.hidden.add_(reduce_scatter_tokens(self._tp, partial))

    def _run_dense(self, mlp: GatedMlp) -> Callable[[HalfState], None]:
        def run_dense(state: HalfState) -> None:
            self._add_partial(state, self._mlp_norm(state.hidden), mlp)

        return run_dense

    def _route(self, layer: MoeLayer) -> Callable[[HalfState], None]:
        def route(state: HalfState) -> None:
            state.moe = layer.route(self._mlp_norm(state.hidden), state.dummy, state.capacity)

        return route


class _MoeParts:
    """The parts of a layer with experts, on a half's state, and the stages that they make."""

    def __init__(self, layer: MoeLayer) -> None:
        self._layer = layer

    def stages(self, attend: Part, routing: Part) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
        """Of the leading half (or the whole pass), and of the trailing one.

        The leading half runs its shared expert while its tokens travel. The trailing half's have the leading one's
        experts to hide behind; it keeps its shared expert until its results travel, which have only half A's attention.
        """
        first = attend, routing, Part("dispatch", self._send)
        shared = Part("shared expert", self._share)
        experts = Part("experts", self._run_experts), Part("combine", self._send_back)  # at once: results travel now
        last = (Part("combine", self._add),)
        return (first, (shared, *experts), last), (first, (*experts, shared), last)

    def _send(self, state: HalfState) -> None:
        self._layer.dispatch_send(_moe(state))

    def _share(self, state: HalfState) -> None:
        self._layer.run_shared(_moe(state))

    def _run_experts(self, state: HalfState) -> None:
        self._layer.run_experts(_moe(state))

    def _send_back(self, state: HalfState) -> None:
        self._layer.combine_send(_moe(state))

    def _add(self, state: HalfState) -> None:
        state.hidden.add_(self._layer.combine_recv(_moe(state)))
        state.moe = None


def _moe(state: HalfState) -> MoeState:
    assert state.moe is not None
    return state.moe
