"""torch.distributed over several hosts and epochs (NCCL on accelerators, gloo on the CPU).

The ranks first meet over TCP, with epoch and secret, and can be called off there; then rank 0 says where its store is,
over which the library's own connections are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from parallel.abort import AbortSignal
from parallel.groups import host_store, join_ranks, leave_ranks, listen_at
from parallel.layout import Layout, RankGroups, build_groups, solo_groups
from parallel.socket_group import close_groups

JOIN_TIMEOUT_S = {"cpu": 60.0}  # then whoever has not come is missed; also a bound on every collective
ACCELERATOR_TIMEOUT_S = 600.0  # kernels are compiled while others wait
_ADDRESS_BYTES = 128


@dataclass(frozen=True)
class TorchRanks:
    """One epoch of one rank."""

    groups: RankGroups
    _met: RankGroups
    _store: TCPStore | None  # the others' way to each other, on rank 0

    def leave(self) -> None:
        """Out of the epoch, whatever the other ranks do."""
        leave_ranks(self.groups)
        close_groups(self._met)


def join_over(
    met: RankGroups, layout: Layout, rank: int, *, host: str, epoch: int, device_type: str, abort: AbortSignal
) -> TorchRanks:
    """Groups of torch.distributed for ranks that have met over `met` (build_host_groups), which goes with them.

    Collective. `host`: this rank's address that the others can reach. Raises what `met` raises, and RuntimeError when
    a rank goes away meanwhile.
    """
    store, address = None, ""
    if rank == 0:
        listener = listen_at(host)
        address = f"{host} {listener.getsockname()[1]}"
        store = host_store(listener)
    store_host, store_port = _read(met.ep.all_gather(_write(address)).wait()[0]).split()
    timeout = timedelta(seconds=JOIN_TIMEOUT_S.get(device_type, ACCELERATOR_TIMEOUT_S))
    try:
        join_ranks(
            rank, layout.ep, host=store_host, port=int(store_port), device_type=device_type, epoch=epoch,
            timeout=timeout,
        )
        return TorchRanks(build_groups(layout, device_type, abort), met, store)
    except BaseException:
        leave_ranks(solo_groups())
        raise


def _write(text: str) -> Tensor:
    """[1, _ADDRESS_BYTES] uint8."""
    data = text.encode()
    assert len(data) <= _ADDRESS_BYTES, text
    return torch.tensor([list(data.ljust(_ADDRESS_BYTES))], dtype=torch.uint8)


def _read(row: Tensor) -> str:
    return bytes(row.tolist()).decode().strip()
