"""Groups of ranks on several hosts: shared memory inside a host, TCP between hosts (exchange = "sockets")."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.abort import AbortSignal
from parallel.group import Group, SoloGroup
from parallel.layout import Layout, RankGroups
from parallel.linked_group import LinkedGroup
from parallel.shm_group import ShmGroup, Sleeper
from parallel.socket_greeting import Self
from parallel.socket_link import Link
from parallel.socket_listener import ExchangeListener
from parallel.socket_meeting import Key, Meeting
from parallel.socket_mover import Mover

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
    assert len(addresses) == len(node_of_rank) == layout.ep, (len(addresses), len(node_of_rank), layout)
    members = {"tp": _tp_ranks(layout, rank), "ep": range(layout.ep)}
    away = [
        (name, peer) for name, ranks in members.items() for peer in ranks if node_of_rank[peer] != node_of_rank[rank]
    ]
    sockets = Meeting(Self(rank=rank, epoch=epoch, secret=secret), listener, abort).meet(
        {key: addresses[key[1]] for key in away if key[1] < rank}, [key for key in away if key[1] > rank], timeout_s
    )
    builder = _Builder(rank, node_of_rank, segments, slot_bytes, sleeper, abort, sockets)
    return RankGroups(tp=builder.group("tp", members["tp"]), ep=builder.group("ep", members["ep"]))


def close_groups(groups: RankGroups) -> None:
    """Close the connections of an epoch's groups; whoever still waits for this rank is told that it is lost."""
    for group in (groups.tp, groups.ep):
        if isinstance(group, LinkedGroup):
            group.close()


def _tp_ranks(layout: Layout, rank: int) -> range:
    first = layout.dp_rank(rank) * layout.tp
    return range(first, first + layout.tp)


@dataclass(frozen=True)
class _Builder:
    """What the groups of one rank are built from."""

    rank: int
    node_of_rank: Sequence[int]
    segments: Mapping[str, int]
    slot_bytes: int
    sleeper: Sleeper
    abort: AbortSignal
    sockets: Mapping[Key, socket.socket]

    def group(self, name: str, ranks: Sequence[int]) -> Group:
        """The group of `ranks`, numbered in their order."""
        if len(ranks) == 1:
            return SoloGroup(name)
        own, node = ranks.index(self.rank), self.node_of_rank[self.rank]
        here = [i for i, rank in enumerate(ranks) if self.node_of_rank[rank] == node]
        local = self._local(name, here.index(own), [ranks[i] for i in here]) if len(here) > 1 else None
        if local is not None and len(here) == len(ranks):
            return local
        mover = Mover()
        links = {
            i: Link(self.sockets[name, rank], group=name, own=self.rank, peer=rank, mover=mover)
            for i, rank in enumerate(ranks) if i not in here
        }
        return LinkedGroup(
            name, own, len(ranks), links=links, local=local, local_ranks=here, mover=mover, abort=self.abort
        )

    def _local(self, name: str, rank: int, labels: Sequence[int]) -> ShmGroup:
        return ShmGroup(
            name, rank, len(labels), self.segments[name], self.slot_bytes, self.sleeper, abort=self.abort, labels=labels
        )
