"""Groups of ranks on several hosts: shared memory inside a host, TCP between hosts (exchange = "sockets")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallel.abort import AbortSignal
from parallel.layout import Layout, RankGroups
from parallel.shm_group import Sleeper
from parallel.socket_listener import ExchangeListener

__all__ = ["ExchangeListener", "build_host_groups", "close_groups"]

MEET_TIMEOUT_S = 60.0


def build_host_groups(
    layout: Layout,
    rank: int,
    *,
    epoch: int,
    addresses: Sequence[tuple[str, int]],
    node_of_rank: Sequence[int],
    segments: Mapping[str, int],
    slot_bytes: int,
    listener: ExchangeListener,
    secret: bytes,
    sleeper: Sleeper,
    abort: AbortSignal,
    timeout_s: float = MEET_TIMEOUT_S,
) -> RankGroups:
    """The groups of `rank`, connected to all others. Collective: every rank of the layout calls it with one epoch.

    `addresses`: (host, port) of every rank's listener, `node_of_rank` the host it is on, both [layout.ep].
    `segments`: for "tp" and "ep", the zeroed shared memory of this epoch that the group's ranks on this host share:
    `segment_size(number of them, slot_bytes)` bytes; no entry where this rank is the group's only one on its host.
    Raises PeersMissing, PeerLost, StaleEpoch or ExchangeRefused naming ranks; Aborted when `abort` is set meanwhile.
    """
    raise NotImplementedError


def close_groups(groups: RankGroups) -> None:
    """Close the connections of an epoch's groups; whoever still waits for this rank is told that it is lost."""
    raise NotImplementedError
