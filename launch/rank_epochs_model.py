"""What takes part in a cluster's epochs (launch/rank_epochs.py): the model, and groups that are replaced under it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from launch.config import LaunchConfig
from launch.rank_epochs import ClusterRankSpec, Member
from parallel.abort import AbortSignal
from parallel.group import SoloGroup
from parallel.layout import RankGroups, with_ledger
from parallel.ledger import Ledger
from parallel.socket_group import ExchangeListener, build_host_groups, close_groups
from parallel.switch_group import SwitchGroup
from parallel.torch_ranks import join_over
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
        self._part: Callable[[], None] | None = None  # from the other ranks of this epoch
        self._vitals: RankVitals | None = None
        self._trace = Recorder()  # the model keeps it, as it keeps its groups
        self._served: ServedRank | None = None

    @property
    def port(self) -> int:
        return self._listener.port

    def join(self, join: RankJoin, segments: Mapping[str, int], vitals: RankVitals) -> Served:
        self._vitals, vitals.trace = vitals, self._trace
        vitals.phase("meeting the other ranks")
        vitals.waiting(text_field("rendezvous"))  # what goes wrong in here is the others' doing
        groups = self._meet(join, segments)
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
        if self._part is not None:
            self._part()
        self._part, self._vitals = None, None

    def _meet(self, join: RankJoin, segments: Mapping[str, int]) -> RankGroups:
        met = build_host_groups(
            self._config.layout, self._spec.rank, epoch=join.epoch,
            addresses=list(zip(join.hosts, join.ports, strict=True)), node_of_rank=join.nodes, segments=segments,
            slot_bytes=join.slot_bytes, listener=self._listener, secret=bytes.fromhex(self._spec.secret),
            sleeper=best_sleeper(), abort=self._abort,
        )
        self._part = partial(close_groups, met)
        if self._config.shares_memory:
            return met
        ranks = join_over(
            met, self._config.layout, self._spec.rank, host=self._spec.host, epoch=join.epoch,
            device_type=self._config.device.partition(":")[0], abort=self._abort,
        )
        self._part = ranks.leave
        return ranks.groups

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
