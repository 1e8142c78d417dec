"""Dispatch by all-to-all: a token goes once to each rank that holds at least one of its experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.dispatch_message import pack, unpack
from moe.dispatch_protocol import Dispatched, DispatchHandle
from moe.router import Routing
from parallel.group import Group, Pending


@dataclass(frozen=True, slots=True)
class _Route:
    """Where this rank's tokens go: rows in order of rank, then of token."""

    token_idx: Tensor  # [num_sent] int64
    send: list[int]  # [size] rows for each rank
    num_tokens: int
    top_k: int


@dataclass(frozen=True, slots=True)
class _Announced:
    route: _Route
    message: Tensor  # [num_sent, hidden_size + 2 * top_k]
    receive: Pending  # of [size] int64, rows from each rank


@dataclass(frozen=True, slots=True)
class _Sent:
    route: _Route
    receive: list[int]  # [size]
    message: Pending  # of [num_received, hidden_size + 2 * top_k]


@dataclass(frozen=True, slots=True)
class _Returning:
    route: _Route
    output: Pending  # of [num_sent, hidden_size]


class AllToAllDispatcher:
    """Sends nothing that is not needed; row counts travel first, and the host waits for them.

    `group` holds `group.size * num_local_experts` experts, rank r those from `r * num_local_experts` on.
    """

    asks_first = True

    def __init__(self, group: Group, num_local_experts: int) -> None:
        self._group, self._num_local_experts = group, num_local_experts

    def announce(self, hidden: Tensor, routing: Routing, capacity: int | None = None) -> DispatchHandle:
        num_tokens, top_k = routing.expert_ids.shape
        wanted = self._wanted(routing.expert_ids)
        counts = wanted.sum(1)  # [size] int64
        receive = self._group.all_to_all(counts)
        token_idx = wanted.nonzero()[:, 1]
        message = pack(hidden, routing).index_select(0, token_idx)
        return DispatchHandle(_Announced(_Route(token_idx, counts.tolist(), num_tokens, top_k), message, receive))

    def dispatch_send(self, handle: DispatchHandle) -> DispatchHandle:
        announced = handle.payload
        assert isinstance(announced, _Announced)
        route, receive = announced.route, announced.receive.wait().tolist()
        message = self._group.all_to_all_uneven(announced.message, route.send, receive)
        return DispatchHandle(_Sent(route, receive, message))

    def dispatch_recv(self, handle: DispatchHandle) -> Dispatched:
        sent = handle.payload
        assert isinstance(sent, _Sent)
        first_expert = self._group.rank * self._num_local_experts
        return unpack(sent.message.wait(), sent.route.top_k, first_expert, self._num_local_experts)

    def combine_send(self, expert_output: Tensor, handle: DispatchHandle) -> DispatchHandle:
        sent = handle.payload
        assert isinstance(sent, _Sent)
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
