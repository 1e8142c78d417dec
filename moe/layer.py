"""One MoE layer as four stages that an overlap runner can interleave over two halves of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe.dispatcher import Dispatcher, DispatchHandle
from moe.experts import Experts, GatedMlp
from moe.router import Router


@dataclass(slots=True)
class MoeState:
    """What one half carries from stage to stage."""

    handle: DispatchHandle
    shared: Tensor | None  # [num_tokens, hidden_size], output of the shared expert
    output: Tensor | None = None  # of this rank's experts


class MoeLayer:
    """Router, dispatcher, experts and an optional shared expert (None also when the experts contain it)."""

    def __init__(self, router: Router, dispatcher: Dispatcher, experts: Experts, shared: GatedMlp | None) -> None:
        self._router, self._dispatcher, self._experts, self._shared = router, dispatcher, experts, shared

    def dispatch_send(self, hidden: Tensor, dummy: Tensor | None = None) -> MoeState:
        """hidden: [num_tokens, hidden_size] after the norm; dummy: [num_tokens] bool, tokens for no expert."""
        handle = self._dispatcher.dispatch_send(hidden, self._router(hidden, dummy))
        # The shared expert needs nothing from other ranks: it runs while tokens travel.
        return MoeState(handle, None if self._shared is None else self._shared(hidden))

    def run_experts(self, state: MoeState) -> None:
        state.output = self._experts(self._dispatcher.dispatch_recv(state.handle))

    def combine_send(self, state: MoeState) -> None:
        assert state.output is not None
        state.handle = self._dispatcher.combine_send(state.output, state.handle)

    def combine_recv(self, state: MoeState) -> Tensor:
        """[num_tokens, hidden_size], the shared expert included."""
        routed = self._dispatcher.combine_recv(state.handle)
        return routed if state.shared is None else routed + state.shared
