"""Where a rank stands: `dp` attention groups of `tp` ranks each, with the experts spread over all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parallel.abort import AbortSignal
from parallel.group import Group, ProcessGroup, SoloGroup
from parallel.ledger import Ledger, LedgerGroup
from parallel.trace import Recorder


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the rank axes. Ranks are numbered dp-major: rank = dp_rank * tp + tp_rank, which is also the ep rank."""

    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected an integer >= 1")

    @property
    def ep(self) -> int:
        return self.dp * self.tp

    def dp_rank(self, rank: int) -> int:
        return rank // self.tp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp


@dataclass(frozen=True, kw_only=True)
class RankGroups:
    """The groups one rank takes part in: its attention group, and all ranks for the experts."""

    tp: Group
    ep: Group
    ledger: Ledger | None = None  # debug mode: where the groups write down their collectives
    trace: Recorder | None = None  # where this rank's spans go while somebody wants them


def solo_groups() -> RankGroups:
    return RankGroups(tp=SoloGroup("tp"), ep=SoloGroup("ep"))


def with_ledger(groups: RankGroups, ledger: Ledger) -> RankGroups:
    """The same groups, writing down what they do."""
    return replace(groups, tp=LedgerGroup(groups.tp, ledger), ep=LedgerGroup(groups.ep, ledger), ledger=ledger)


def build_groups(layout: Layout, device_type: str, abort: AbortSignal | None = None) -> RankGroups:
    """Groups of this process, once torch.distributed runs with `layout.ep` ranks. Collective: every rank calls it.

    `abort` calls off waits for ranks on the CPU.
    """
    assert dist.get_world_size() == layout.ep, (dist.get_world_size(), layout)
    mesh = init_device_mesh(device_type, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    tp: Group = ProcessGroup("tp", mesh.get_group("tp"), abort) if layout.tp > 1 else SoloGroup("tp")
    ep: Group = SoloGroup("ep")
    if layout.ep > 1:
        assert dist.group.WORLD is not None
        ep = ProcessGroup("ep", dist.group.WORLD, abort)
    return RankGroups(tp=tp, ep=ep)
