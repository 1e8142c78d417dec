"""What a dispatch back end must offer: tokens travel to the ranks that hold their experts, results travel back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe.router import Routing


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Tokens for this rank's experts; expert ids are local, the number of local experts stands for none."""

    hidden: Tensor  # [num_received, hidden_size]; may be a view of wider rows
    routing: Routing


@dataclass(frozen=True, slots=True)
class DispatchHandle:
    """What a dispatcher's last call left behind for its next. Opaque: only that dispatcher may look inside."""

    payload: object


class Dispatcher(Protocol):
    """Sends and receives are separate calls, so that two halves of a step can interleave them.

    For one layer and half the order is announce, dispatch_send, dispatch_recv, combine_send, combine_recv; each call
    takes the handle of the one before. Every rank of the expert group makes every call, with zero tokens too, and
    the collectives behind a call are the same whatever the data.
    """

    def announce(self, hidden: Tensor, routing: Routing, capacity: int | None = None) -> DispatchHandle:
        """Works out what goes where, once the routing is known.

        hidden: [num_tokens, hidden_size] of this rank, unchanged until dispatch_recv. routing: global expert ids, the
        number of experts standing for none. capacity: the most tokens that any rank has, equal on all ranks; None when
        all have the same number of tokens.
        """

    def dispatch_send(self, handle: DispatchHandle) -> DispatchHandle:
        """Has the tokens under way when it returns, and waits for nobody."""

    def dispatch_recv(self, handle: DispatchHandle) -> Dispatched:
        """Waits for the tokens routed to this rank. The handle stays good for combine_send."""

    def combine_send(self, expert_output: Tensor, handle: DispatchHandle) -> DispatchHandle:
        """Starts the way back and returns at once; takes the handle of dispatch_send.

        expert_output: [num_received, hidden_size], weighted and summed over this rank's experts; must not be changed
        before combine_recv.
        """

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        """[num_tokens, hidden_size]: the sum over all ranks in rank order; rows in the order of announce."""
