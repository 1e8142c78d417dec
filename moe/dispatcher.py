"""Moves tokens to the ranks that hold their experts and brings the results back, in separate sends and receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe.router import Routing


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Tokens for this rank's experts; expert ids are local, the number of local experts stands for none."""

    hidden: Tensor  # [num_received, hidden_size]
    routing: Routing


@dataclass(frozen=True, slots=True)
class DispatchHandle:
    """What a dispatch left behind for its combine. Opaque: only the dispatcher that made it may look inside."""

    payload: object


class Dispatcher(Protocol):
    """One call each for sending and receiving, so that two halves of a step can interleave them.

    For one layer and half the order is dispatch_send, dispatch_recv, combine_send, combine_recv. Every rank of the
    expert group makes every call, with zero tokens too.
    """

    def dispatch_send(self, hidden: Tensor, routing: Routing) -> DispatchHandle:
        """hidden: [num_tokens, hidden_size] of this rank. Starts the exchange and returns at once."""

    def dispatch_recv(self, handle: DispatchHandle) -> Dispatched:
        """Waits for the tokens routed to this rank."""

    def combine_send(self, expert_output: Tensor, handle: DispatchHandle) -> DispatchHandle:
        """expert_output: [num_received, hidden_size], weighted and summed over this rank's experts."""

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        """[num_tokens, hidden_size]: the sum over all ranks, in the order of dispatch_send."""


class LocalDispatcher:
    """All experts live here: nothing moves. The reference for every other back end."""

    def dispatch_send(self, hidden: Tensor, routing: Routing) -> DispatchHandle:
        return DispatchHandle(Dispatched(hidden, routing))

    def dispatch_recv(self, handle: DispatchHandle) -> Dispatched:
        assert isinstance(handle.payload, Dispatched)
        return handle.payload

    def combine_send(self, expert_output: Tensor, handle: DispatchHandle) -> DispatchHandle:
        return DispatchHandle(expert_output)

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        assert isinstance(handle.payload, Tensor)
        return handle.payload
