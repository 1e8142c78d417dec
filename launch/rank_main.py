"""One rank process: `python -m launch.rank_main`, with its specification as JSON on standard input.

Started by launch/deployment.py. It ends with its parent, whatever happens to either.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.rank_loop import RankLoop, Served
from runtime.ring import RingReader, RingWriter
from runtime.vitals import RankVitals, text_field

if TYPE_CHECKING:
    from parallel.layout import Layout, RankGroups
    from runtime.config import EngineConfig

PR_SET_PDEATHSIG = 1  # linux/prctl.h
EXIT_OK, EXIT_FAILED, EXIT_ORPHANED = 0, 1, 3


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """Everything a rank is told at birth. `config` holds the fields of EngineConfig; descriptors are inherited."""

    rank: int
    parent_pid: int
    store_port: int
    vitals_fd: int
    plans_fd: int
    results_fd: int
    tp_fd: int  # shared memory of the groups, -1: they are of torch.distributed, or of one rank
    ep_fd: int
    exchange_bytes: int
    config: Mapping[str, Any]

    @property
    def tp(self) -> int:
        return int(self.config["tp"])

    @property
    def num_ranks(self) -> int:
        return int(self.config["dp"]) * self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), default=str).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RankSpec:
        return cls(**json.loads(data))


Build = Callable[[RankSpec, RankVitals], Served]


def main(build: Build) -> None:
    """Be the rank that standard input describes; never returns."""
    die_with_parent()
    data = sys.stdin.buffer.read()
    if not data:
        os._exit(EXIT_ORPHANED)
    spec = RankSpec.from_json(data)
    exit_if_orphaned(spec.parent_pid)  # it may have ended before the first line of this function
    vitals = RankVitals(spec.vitals_fd, spec.rank)
    vitals.phase("importing libraries")
    vitals.start(partial(exit_if_orphaned, spec.parent_pid))
    results = RingWriter(spec.results_fd, f"results of rank {spec.rank}", ["controller"])
    loop = RankLoop(
        RingReader(spec.plans_fd, spec.rank), results, vitals, is_leader=spec.rank % spec.tp == 0,
        debug=bool(spec.config["debug"]),
    )
    ended_well = loop.serve(partial(build, spec, vitals))
    sys.stderr.flush()
    os._exit(EXIT_OK if ended_well else EXIT_FAILED)  # not sys.exit: a lost connection may hold up destructors


def build_rank(spec: RankSpec, vitals: RankVitals, wrap: Callable[[RankGroups], RankGroups] | None = None) -> Served:
    """Take up the groups, then load this rank's share of the model. `wrap` may put something around the groups."""
    from parallel.layout import with_ledger
    from parallel.ledger import Ledger
    from runtime.config import EngineConfig
    from runtime.loading import local_device
    from runtime.rank import Rank
    from runtime.served_rank import ServedRank
    from runtime.watched_group import watch_groups

    config = EngineConfig(**{**spec.config, "model": Path(spec.config["model"])})
    config = replace(config, device=local_device(config.device, spec.rank, spec.num_ranks))
    if spec.ep_fd >= 0:
        groups = _groups_in_shared_memory(spec, config.layout)
    else:
        groups = _groups_of_torch(spec, config, vitals)
    groups = watch_groups(wrap(groups) if wrap is not None else groups, vitals)
    if config.debug:
        groups = with_ledger(groups, Ledger())
    return ServedRank(Rank.load(config, groups, phase=vitals.phase), spec.dp_rank)


def _groups_in_shared_memory(spec: RankSpec, layout: Layout) -> RankGroups:
    from parallel.group import Group, SoloGroup
    from parallel.layout import RankGroups
    from parallel.shm_group import ShmGroup
    from runtime.futex import best_sleeper

    ep = ShmGroup("ep", spec.rank, layout.ep, spec.ep_fd, spec.exchange_bytes, best_sleeper())
    tp: Group = SoloGroup("tp")
    if layout.tp > 1:
        rank = layout.tp_rank(spec.rank)
        tp = ShmGroup("tp", rank, layout.tp, spec.tp_fd, spec.exchange_bytes, best_sleeper())
    return RankGroups(tp=tp, ep=ep)


def _groups_of_torch(spec: RankSpec, config: EngineConfig, vitals: RankVitals) -> RankGroups:
    from parallel.groups import join_ranks
    from parallel.layout import build_groups

    device_type = config.device.partition(":")[0]
    vitals.phase("meeting the other ranks")
    vitals.waiting(text_field("rendezvous"))
    join_ranks(spec.rank, spec.num_ranks, port=spec.store_port, device_type=device_type)
    groups = build_groups(config.layout, device_type)
    vitals.waited()
    return groups


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends; elsewhere the heartbeat notices."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_if_orphaned(parent_pid: int) -> None:
    """End this process if another one has taken it over."""
    if os.getppid() != parent_pid:
        os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    main(build_rank)
