"""Which way tokens reach their experts: nowhere to go, an all-to-all of what is needed, or an all-gather."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from moe.dispatch_all_to_all import AllToAllDispatcher
from moe.dispatch_gather import AllGatherDispatcher
from moe.dispatch_protocol import Dispatched, Dispatcher, DispatchHandle
from moe.router import Routing
from parallel.group import Group

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "DispatchHandle",
    "DispatchKind",
    "Dispatched",
    "Dispatcher",
    "LocalDispatcher",
    "make_dispatcher",
]

DispatchKind = Literal["auto", "all_gather", "all_to_all"]


class LocalDispatcher:
    """All experts live here: nothing moves. The reference for every other back end."""

    def announce(self, hidden: Tensor, routing: Routing, capacity: int | None = None) -> DispatchHandle:
        return DispatchHandle(Dispatched(hidden, routing))

    def dispatch_send(self, handle: DispatchHandle) -> DispatchHandle:
        return handle

    def dispatch_recv(self, handle: DispatchHandle) -> Dispatched:
        assert isinstance(handle.payload, Dispatched)
        return handle.payload

    def combine_send(self, expert_output: Tensor, handle: DispatchHandle) -> DispatchHandle:
        return DispatchHandle(expert_output)

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        assert isinstance(handle.payload, Tensor)
        return handle.payload


def make_dispatcher(kind: DispatchKind, ep: Group, num_experts: int, device: torch.device | str) -> Dispatcher:
    """The back end of one rank; `kind` has no say when `ep` is one rank.

    "auto" takes all_to_all on the CPU, where bytes are dear and waiting is cheap, and all_gather on accelerators,
    which must not wait for the host. Raises ValueError for an unknown kind, or experts that do not divide by ranks.
    """
    if kind not in get_args(DispatchKind):
        raise ValueError(f"dispatch = {kind!r}: expected one of {', '.join(get_args(DispatchKind))}")
    if num_experts % ep.size:
        raise ValueError(f"{num_experts} experts do not divide by the {ep.size} ranks of dp x tp: change dp or tp")
    if ep.size == 1:
        return LocalDispatcher()
    if kind == "all_to_all" or (kind == "auto" and torch.device(device).type == "cpu"):
        return AllToAllDispatcher(ep, num_experts // ep.size)
    return AllGatherDispatcher(ep, num_experts // ep.size)
