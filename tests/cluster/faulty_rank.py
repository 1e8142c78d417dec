"""A rank of a cluster that raises when it is told to: `--rank-module tests.cluster.faulty_rank`.

A file FAULTS_FOLDER/rank-R that holds "before", "inside" or "after" makes rank R raise around its next collective; the
file is taken away first, so that it happens once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from torch import Tensor

from launch.rank_epochs import ClusterRankSpec, Member, main
from launch.rank_epochs_model import ModelMember
from parallel.abort import AbortSignal
from parallel.group import Group, Pending, PendingRows, Waiting
from parallel.layout import RankGroups

Result = TypeVar("Result")
FOLDER = "LOCKSTEP_FAULTS_FOLDER"


class InjectedError(KeyError):
    """What a rank raises that was told to."""


class RaisingGroup:
    """Looks for an order before every collective over `group`."""

    def __init__(self, group: Group, order: Path) -> None:
        self.name, self.rank, self.size = group.name, group.rank, group.size
        self._group, self._order = group, order

    def all_gather(self, x: Tensor) -> Pending:
        return self._call(lambda: self._group.all_gather(x))

    def reduce_scatter(self, x: Tensor) -> Pending:
        return self._call(lambda: self._group.reduce_scatter(x))

    def all_to_all(self, x: Tensor) -> Pending:
        return self._call(lambda: self._group.all_to_all(x))

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return self._call(lambda: self._group.all_to_all_uneven(x, send, receive))

    def all_to_all_sized(self, x: Tensor, send: Sequence[int], most: int) -> PendingRows:
        return self._call(lambda: self._group.all_to_all_sized(x, send, most))

    def _call(self, start: Callable[[], Waiting[Result]]) -> Waiting[Result]:
        where = self._take_order()
        if where == "before":
            raise InjectedError("before a collective")
        pending = start()
        return _RaisingPending(pending, where) if where else pending

    def _take_order(self) -> str:
        if not self._order.exists():
            return ""
        where = self._order.read_text()
        self._order.unlink()
        return where


class _RaisingPending(Generic[Result]):
    def __init__(self, pending: Waiting[Result], where: str) -> None:
        self._pending, self._where = pending, where

    def wait(self) -> Result:
        if self._where == "inside":
            raise InjectedError("inside a collective")
        self._pending.wait()
        raise InjectedError("after a collective")


def make_member(spec: ClusterRankSpec, abort: AbortSignal) -> Member:
    order = Path(os.environ[FOLDER]) / f"rank-{spec.rank}"

    def wrap(groups: RankGroups) -> RankGroups:
        tp, ep = (RaisingGroup(g, order) if g.size > 1 else g for g in (groups.tp, groups.ep))
        return RankGroups(tp=tp, ep=ep)

    return ModelMember(spec, abort, wrap)


if __name__ == "__main__":
    main(make_member)
