"""Dispatch by all-to-all: a token goes once to each rank that holds at least one of its experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.dispatch_message import pack, unpack
from moe.dispatch_protocol import Dispatched, DispatchHandle
from moe.router import Routing
from parallel.group import Group, Pending, PendingRows


@dataclass(frozen=True, slots=True)
class _Route:
    """Where this rank's tokens go: rows in order of rank, then of token."""

    token_idx: Tensor  # [num_sent] int64
    send: list[int]  # [size] rows for each rank
    num_tokens: int
    top_k: int


@dataclass(frozen=True, slots=True)
class _Packed:
    route: _Route
    message: Tensor  # [num_sent, hidden_size + 2 * top_k]
    most: int  # rows that any rank may send to another


@dataclass(slots=True)
class _Sent:
    route: _Route
    message: PendingRows  # of [num_received, hidden_size + 2 * top_k]
    receive: list[int] | None = None  # [size] rows from each rank, once they are here


@dataclass(frozen=True, slots=True)
class _Returning:
    route: _Route
    output: Pending  # of [num_sent, hidden_size]


class AllToAllDispatcher:
    """Sends nothing that is not needed; how many rows come from where is learnt from the messages themselves.

    `group` holds `group.size * num_local_experts` experts, rank r those from `r * num_local_experts` on.
    """

    def __init__(self, group: Group, num_local_experts: int) -> None:
        self._group, self._num_local_experts = group, num_local_experts

    def announce(self, hidden: Tensor, routing: Routing, capacity: int | None = None) -> DispatchHandle:
        num_tokens, top_k = routing.expert_ids.shape
        wanted = self._wanted(routing.expert_ids)
        token_idx = wanted.nonzero()[:, 1]
        message = pack(hidden, routing).index_select(0, token_idx)
        route = _Route(token_idx, wanted.sum(1).tolist(), num_tokens, top_k)
        return DispatchHandle(_Packed(route, message, num_tokens if capacity is None else capacity))

    def dispatch_send(self, handle: DispatchHandle) -> DispatchHandle:
        packed = handle.payload
        assert isinstance(packed, _Packed)
        message = self._group.all_to_all_sized(packed.message, packed.route.send, packed.most)
        return DispatchHandle(_Sent(packed.route, message))

    def dispatch_recv(self, handle: DispatchHandle) -> Dispatched:
        sent = handle.payload
        assert isinstance(sent, _Sent)
        message, sent.receive = sent.message.wait()
        first_expert = self._group.rank * self._num_local_experts
        return unpack(message, sent.route.top_k, first_expert, self._num_local_experts)

    def combine_send(self, expert_output: Tensor, handle: DispatchHandle) -> DispatchHandle:
        sent = handle.payload
        assert isinstance(sent, _Sent)
        assert sent.receive is not None, "dispatch_recv comes first"
        output = self._group.all_to_all_uneven(expert_output, sent.receive, sent.route.send)
        return DispatchHandle(_Returning(sent.route, output))

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        returning = handle.payload
        assert isinstance(returning, _Returning)
        route, output = returning.route, returning.output.wait()
        total = output.new_zeros((route.num_tokens, output.shape[1]))
        # One rank after the other: a token appears once in each part, so that the order of addition is fixed.
        parts = torch.split(route.token_idx, route.send), torch.split(output, route.send)
        for token_idx, part in zip(*parts, strict=True):
            total.index_add_(0, token_idx, part)
        return total

    def _wanted(self, expert_ids: Tensor) -> Tensor:
        """[num_tokens, top_k] global ids -> [size, num_tokens] bool: which rank must see which token."""
        owner = expert_ids.div(self._num_local_experts, rounding_mode="floor")  # `size` for no expert
        wanted = expert_ids.new_zeros((self._group.size + 1, expert_ids.shape[0]), dtype=torch.bool)
        return wanted.scatter_(0, owner.t(), True)[: self._group.size]
