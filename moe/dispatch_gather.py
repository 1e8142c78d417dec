"""Dispatch by all-gather: every rank gets all tokens, in shapes that are known without asking."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe.dispatch_message import pack, unpack
from moe.dispatch_protocol import Dispatched, DispatchHandle
from moe.router import Routing
from parallel.group import Group, Pending
from parallel.tokens import pad_to


@dataclass(frozen=True, slots=True)
class _Packed:
    message: Tensor  # [capacity, hidden_size + 2 * top_k]
    num_tokens: int
    top_k: int


@dataclass(frozen=True, slots=True)
class _Gathering:
    message: Pending  # of [size * capacity, hidden_size + 2 * top_k]
    num_tokens: int
    top_k: int


@dataclass(frozen=True, slots=True)
class _Returning:
    output: Pending  # of [size * capacity, hidden_size]: what each rank adds to this rank's tokens
    num_tokens: int


class AllGatherDispatcher:
    """No call waits for the host, so that launches run ahead and graphs can be captured; costs size-fold traffic.

    `group` holds `group.size * num_local_experts` experts, rank r those from `r * num_local_experts` on.
    """

    def __init__(self, group: Group, num_local_experts: int) -> None:
        self._group, self._num_local_experts = group, num_local_experts

    def announce(self, hidden: Tensor, routing: Routing, capacity: int | None = None) -> DispatchHandle:
        num_tokens, top_k = routing.expert_ids.shape
        capacity = num_tokens if capacity is None else capacity
        assert capacity >= num_tokens, (capacity, num_tokens)
        return DispatchHandle(_Packed(pad_to(pack(hidden, routing), capacity), num_tokens, top_k))

    def dispatch_send(self, handle: DispatchHandle) -> DispatchHandle:
        packed = handle.payload
        assert isinstance(packed, _Packed)
        message = self._group.all_gather(packed.message)
        return DispatchHandle(_Gathering(message, packed.num_tokens, packed.top_k))

    def dispatch_recv(self, handle: DispatchHandle) -> Dispatched:
        sent = handle.payload
        assert isinstance(sent, _Gathering)
        first_expert = self._group.rank * self._num_local_experts
        return unpack(sent.message.wait(), sent.top_k, first_expert, self._num_local_experts)

    def combine_send(self, expert_output: Tensor, handle: DispatchHandle) -> DispatchHandle:
        sent = handle.payload
        assert isinstance(sent, _Gathering)
        return DispatchHandle(_Returning(self._group.all_to_all(expert_output), sent.num_tokens))

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        returning = handle.payload
        assert isinstance(returning, _Returning)
        # Not a reduce-scatter: its order of addition is the library's choice and may change with the message size.
        output = returning.output.wait()
        blocks = output.view(self._group.size, output.shape[0] // self._group.size, output.shape[1])
        total, *others = blocks[:, : returning.num_tokens].unbind(0)  # each [num_tokens, hidden_size]
        for other in others:
            total.add_(other)
        return total
