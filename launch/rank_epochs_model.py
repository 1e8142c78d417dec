"""What takes part in a cluster's epochs (launch/rank_epochs.py): the model, and groups that are replaced under it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace

from launch.config import LaunchConfig
from launch.rank_epochs import ClusterRankSpec, Member
from parallel.abort import AbortSignal
from parallel.group import SoloGroup
from parallel.groups import host_store, join_ranks, leave_ranks
from parallel.layout import RankGroups, build_groups, solo_groups, with_ledger
from parallel.ledger import Ledger
from parallel.socket_group import ExchangeListener, build_host_groups, close_groups
from parallel.switch_group import SwitchGroup
from parallel.trace import Recorder
from runtime.cluster.keeper_messages import RankJoin
from runtime.futex import best_sleeper
from runtime.loading import local_device
from runtime.rank import Rank
from runtime.rank_loop import Served
from runtime.served_rank import ServedRank
from runtime.vitals import RankVitals, text_field
from runtime.watched_group import watch_groups

Wrap = Callable[[RankGroups], RankGroups]


class ModelMember:
    """One rank's share of the model. `wrap` may put something around the groups of every epoch (tests with faults)."""

    def __init__(self, spec: ClusterRankSpec, abort: AbortSignal, wrap: Wrap | None = None) -> None:
        config = LaunchConfig.model_validate(spec.config).engine_config()
        device = local_device(config.device, spec.local_rank, spec.local_world_size)
        self._config = replace(config, device=device)
        self._spec, self._abort, self._wrap = spec, abort, wrap
        self._listener = ExchangeListener(spec.host)
        layout = config.layout
        self._tp = SwitchGroup("tp", layout.tp_rank(spec.rank), layout.tp)
        self._ep = SwitchGroup("ep", spec.rank, layout.ep)
        self._groups: RankGroups | None = None  # of this epoch
        self._vitals: RankVitals | None = None
        self._trace = Recorder()  # the model keeps it, as it keeps its groups
        self._served: ServedRank | None = None
        self._store: object = None  # what the ranks meet over, where they exchange through torch.distributed
        self._has_joined = False  # torch.distributed

    @property
    def port(self) -> int:
        return self._listener.port

    def join(self, join: RankJoin, segments: Mapping[str, int], vitals: RankVitals) -> Served:
        self._vitals, vitals.trace = vitals, self._trace
        vitals.phase("meeting the other ranks")
        vitals.waiting(text_field("rendezvous"))  # what goes wrong in here is the others' doing
        meet = self._meet if self._config.shares_memory else self._meet_by_torch
        self._groups = groups = meet(join, segments)
        groups = watch_groups(self._wrap(groups) if self._wrap is not None else groups, vitals)
        vitals.waited()
        self._tp.use(groups.tp)
        self._ep.use(groups.ep)
        if self._served is None:
            self._served = self._load()
        self._served.take_digests()  # what a step that was called off has noted
        return self._served

    def leave(self) -> None:
        self._tp.use(None)
        self._ep.use(None)
        if self._config.shares_memory:
            if self._groups is not None:
                close_groups(self._groups)
        elif self._has_joined:
            leave_ranks(self._groups or solo_groups())
        self._groups, self._vitals, self._has_joined = None, None, False

    def _meet(self, join: RankJoin, segments: Mapping[str, int]) -> RankGroups:
        return build_host_groups(
            self._config.layout, self._spec.rank, epoch=join.epoch,
            addresses=list(zip(join.hosts, join.ports, strict=True)), node_of_rank=join.nodes, segments=segments,
            slot_bytes=join.slot_bytes, listener=self._listener, secret=bytes.fromhex(self._spec.secret),
            sleeper=best_sleeper(), abort=self._abort,
        )

    def _meet_by_torch(self, join: RankJoin, _segments: Mapping[str, int]) -> RankGroups:
        """For accelerators. Rank 0 hosts the store, where its exchanges would be met otherwise."""
        spec, device_type = self._spec, self._config.device.partition(":")[0]
        if spec.rank == 0 and self._store is None:
            self._store = host_store(socket.socket(fileno=os.dup(self._listener.fileno())))
        self._has_joined = True
        join_ranks(
            spec.rank, spec.world_size, host=join.hosts[0], port=join.ports[0], device_type=device_type,
            epoch=join.epoch,
        )
        return build_groups(self._config.layout, device_type, self._abort)

    def _load(self) -> ServedRank:
        tp, ep = (group if group.size > 1 else SoloGroup(group.name) for group in (self._tp, self._ep))
        groups = RankGroups(tp=tp, ep=ep, trace=self._trace)
        if self._config.debug:
            groups = with_ledger(groups, Ledger())
        return ServedRank(Rank.load(self._config, groups, phase=self._phase), self._spec.rank // self._config.tp)

    def _phase(self, text: str) -> None:
        if self._vitals is not None:
            self._vitals.phase(text)


def make_member(spec: ClusterRankSpec, abort: AbortSignal) -> Member:
    return ModelMember(spec, abort)
