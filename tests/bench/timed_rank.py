"""The rank process with a stopwatch: where the time of a step goes, by stage and by collective, on rank 0.

    python tests/bench/where_time_goes.py ... starts it.

A stage's own time is what is left without the collectives that it starts or waits for. The totals since the first
decode step go to the file that LOCKSTEP_BENCH_TIMES names.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from launch.rank_main import RankSpec, build_rank, main
from parallel.group import Group, Pending, PendingRows, Waiting
from parallel.layout import RankGroups
from runtime.rank_loop import Served
from runtime.vitals import RankVitals

T = TypeVar("T")
WARM_UP = 4  # steps before the clock starts


class Stopwatch:
    """Nested intervals: what an inner one takes is not counted in the outer one."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self._open: list[float] = []  # time of inner intervals, for each open one

    def timed(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._open.append(0.0)
        begin = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent = time.perf_counter() - begin
            self.totals[name] += spent - self._open.pop()
            if self._open:
                self._open[-1] += spent

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)
        setattr(owner, method, lambda *args, **kwargs: self.timed(name, inner, *args, **kwargs))


class TimedGroup:
    def __init__(self, group: Group, watch: Stopwatch) -> None:
        self.name, self.rank, self.size = group.name, group.rank, group.size
        self._group, self._watch = group, watch

    def all_gather(self, x: Tensor) -> Pending:
        return self._start(self._group.all_gather, x)

    def reduce_scatter(self, x: Tensor) -> Pending:
        return self._start(self._group.reduce_scatter, x)

    def all_to_all(self, x: Tensor) -> Pending:
        return self._start(self._group.all_to_all, x)

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return self._start(self._group.all_to_all_uneven, x, send, receive)

    def all_to_all_sized(self, x: Tensor, send: Sequence[int], most: int) -> PendingRows:
        return self._start(self._group.all_to_all_sized, x, send, most)

    def _start(self, operation: Callable[..., Waiting[T]], *args: Any) -> Waiting[T]:
        name = f"exchange on {self.name}"
        pending: Waiting[T] = self._watch.timed(name, operation, *args)
        return TimedPending(pending, name, self._watch)


class TimedPending(Generic[T]):
    def __init__(self, pending: Waiting[T], name: str, watch: Stopwatch) -> None:
        self._pending, self._name, self._watch = pending, name, watch

    def wait(self) -> T:
        result: T = self._watch.timed(self._name, self._pending.wait)
        return result


class TimedRank:
    """A served rank; after every step the totals are written down."""

    def __init__(self, inner: Served, watch: Stopwatch, path: Path | None) -> None:
        self._inner, self._watch, self._path = inner, watch, path
        self._steps = 0
        self._ended = 0.0

    @property
    def facts(self) -> Mapping[str, int]:
        return self._inner.facts

    def allocate(self, *, max_model_len: int, num_pages: int) -> None:
        self._inner.allocate(max_model_len=max_model_len, num_pages=num_pages)

    def run(self, plans: memoryview, publish: Callable[[bytes], None]) -> None:
        if self._steps == WARM_UP:
            self._watch.totals.clear()
        elif self._steps > WARM_UP:
            self._watch.totals["waiting for the plan"] += time.perf_counter() - self._ended
        self._steps += 1
        self._watch.timed("other", self._inner.run, plans, publish)
        if self._path is not None and self._steps > WARM_UP:
            steps = self._steps - WARM_UP
            self._path.write_text(json.dumps({name: t / steps for name, t in self._watch.totals.items()}))
        self._ended = time.perf_counter()

    def take_digests(self) -> Mapping[str, int] | None:
        return self._inner.take_digests()

    def close(self) -> None:
        self._inner.close()


def instrument(watch: Stopwatch) -> None:
    """Put the stopwatch around the parts of a rank; this process serves nothing else."""
    from moe.layer import MoeLayer
    from mtp.head import MtpHead
    from runtime.attention.mla import MlaAttention
    from runtime.executor import Executor
    from runtime.models.deepseek import DeepseekModel

    for owner, method, name in (
        (MlaAttention, "__call__", "attention"), (MoeLayer, "route", "routing"),
        (MoeLayer, "dispatch_send", "packing"), (MoeLayer, "run_shared", "shared expert"),
        (MoeLayer, "run_experts", "experts"), (MoeLayer, "combine_send", "packing"),
        (MoeLayer, "combine_recv", "packing"), (DeepseekModel, "logits", "logits"), (MtpHead, "logits", "logits"),
        (Executor, "_decide", "acceptance"), (Executor, "_propose", "drafting"),
    ):
        watch.wrap(owner, method, name)


def build(spec: RankSpec, vitals: RankVitals) -> Served:
    watch = Stopwatch()
    path = Path(os.environ["LOCKSTEP_BENCH_TIMES"]) if spec.rank == 0 else None

    def wrap(groups: RankGroups) -> RankGroups:
        return RankGroups(tp=TimedGroup(groups.tp, watch), ep=TimedGroup(groups.ep, watch))

    instrument(watch)
    return TimedRank(build_rank(spec, vitals, wrap), watch, path)


if __name__ == "__main__":
    main(build)
