"""The rank process with a fault: `python -m tests.launch.faulty_rank`, told by the environment what goes wrong.

FAULT = RANK:WHEN:WHERE:WHAT. WHEN is start, prefill or decode; WHERE is before, inside or after a collective, or for a
start joining or loading; WHAT is raise, or a signal this process sends itself. FAULT_TIME names a file that takes
the moment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from torch import Tensor

from launch.rank_main import RankSpec, build_rank, main
from parallel.group import Group, Pending, PendingRows, Waiting
from parallel.layout import RankGroups
from runtime.rank_loop import Served
from runtime.vitals import RankVitals

T = TypeVar("T")
COLLECTIVE = 4  # which one of a step goes wrong: in the midst of the target


@dataclass(kw_only=True)
class Fault:
    """What happens, and how far the rank is."""

    when: str
    where: str
    what: str
    is_armed: bool = False
    num_calls: int = 0

    def strike(self) -> None:
        Path(os.environ["FAULT_TIME"]).write_text(str(time.monotonic()))
        if self.what == "raise":
            raise KeyError("injected")
        os.kill(os.getpid(), getattr(signal, self.what))


class FaultyGroup:
    """Counts the collectives of the armed step over all groups of a rank, and lets one of them go wrong."""

    def __init__(self, group: Group, fault: Fault) -> None:
        self.name, self.rank, self.size = group.name, group.rank, group.size
        self._group, self._fault = group, fault

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

    def _call(self, start: Callable[[], Waiting[T]]) -> Waiting[T]:
        fault = self._fault
        fault.num_calls += fault.is_armed
        if not fault.is_armed or fault.num_calls != COLLECTIVE:
            return start()
        if fault.where == "before":
            fault.strike()
        return _FaultyPending(start(), fault)


class _FaultyPending(Generic[T]):
    def __init__(self, pending: Waiting[T], fault: Fault) -> None:
        self._pending, self._fault = pending, fault

    def wait(self) -> T:
        if self._fault.where == "inside":
            self._fault.strike()
        result = self._pending.wait()
        self._fault.strike()
        return result


class FaultyRank:
    """Arms the fault for the first step (prefill) or the third (decode)."""

    def __init__(self, rank: Served, fault: Fault) -> None:
        self._rank, self._fault, self._num_steps = rank, fault, 0

    @property
    def facts(self) -> Mapping[str, int]:
        return self._rank.facts

    def allocate(self, *, max_model_len: int, num_pages: int) -> None:
        self._rank.allocate(max_model_len=max_model_len, num_pages=num_pages)

    def run(self, plans: memoryview, publish: Callable[[bytes], None]) -> None:
        self._fault.is_armed = self._num_steps == {"prefill": 0, "decode": 2}.get(self._fault.when)
        self._fault.num_calls = 0
        self._num_steps += 1
        self._rank.run(plans, publish)

    def take_digests(self) -> Mapping[str, int] | None:
        return self._rank.take_digests()

    def close(self) -> None:
        self._rank.close()


def build_faulty_rank(spec: RankSpec, vitals: RankVitals) -> Served:
    rank, when, where, what = os.environ["FAULT"].split(":")
    if int(rank) != spec.rank:
        return build_rank(spec, vitals)
    fault = Fault(when=when, where=where, what=what)
    if where == "joining":
        fault.strike()

    def wrap(groups: RankGroups) -> RankGroups:
        if where == "loading":
            fault.strike()
        tp, ep = (FaultyGroup(g, fault) if g.size > 1 else g for g in (groups.tp, groups.ep))
        return RankGroups(tp=tp, ep=ep)

    return FaultyRank(build_rank(spec, vitals, wrap), fault)


if __name__ == "__main__":
    main(build_faulty_rank)
