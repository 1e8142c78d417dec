"""One MoE layer as stages that an overlap runner can interleave over two halves of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe.dispatch_protocol import Dispatcher, DispatchHandle
from moe.experts import Experts, GatedMlp
from moe.replicas import ReplicaMap
from moe.router import Router


@dataclass(slots=True)
class MoeState:
    """What one half carries from stage to stage."""

    hidden: Tensor  # [num_tokens, hidden_size], the layer's input
    handle: DispatchHandle
    shared: Tensor | None = None  # [num_tokens, hidden_size], output of the shared expert
    output: Tensor | None = None  # [num_received, hidden_size] of this rank's experts


class MoeLayer:
    """Router, dispatcher, experts and an optional shared expert (None also when the experts contain it).

    The order is route, dispatch_send, run_experts, combine_send, combine_recv, with run_shared anywhere after route: it
    needs nothing from other ranks and fills a wait. With `replicas` the dispatcher's experts are slots that hold the
    router's, some of them several times (moe/placement.py).
    """

    def __init__(
        self, router: Router, dispatcher: Dispatcher, experts: Experts, shared: GatedMlp | None,
        replicas: ReplicaMap | None = None,
    ) -> None:
        self._router, self._dispatcher, self._experts, self._shared = router, dispatcher, experts, shared
        self._replicas = replicas

    def route(self, hidden: Tensor, dummy: Tensor | None = None, capacity: int | None = None) -> MoeState:
        """Chooses experts, and works out what goes to which rank.

        hidden: [num_tokens, hidden_size] after the norm; dummy: [num_tokens] bool, tokens for no expert; capacity: as
        in `Dispatcher.announce`.
        """
        routing = self._router(hidden, dummy)
        if self._replicas is not None:
            routing = self._replicas(routing)
        return MoeState(hidden, self._dispatcher.announce(hidden, routing, capacity))

    def dispatch_send(self, state: MoeState) -> None:
        state.handle = self._dispatcher.dispatch_send(state.handle)

    def run_shared(self, state: MoeState) -> None:
        if self._shared is not None:
            state.shared = self._shared(state.hidden)

    def run_experts(self, state: MoeState) -> None:
        state.output = self._experts(self._dispatcher.dispatch_recv(state.handle))

    def combine_send(self, state: MoeState) -> None:
        assert state.output is not None
        state.handle = self._dispatcher.combine_send(state.output, state.handle)

    def combine_recv(self, state: MoeState) -> Tensor:
        """[num_tokens, hidden_size], the shared expert included."""
        routed = self._dispatcher.combine_recv(state.handle)
        return routed if state.shared is None else routed + state.shared
