"""Rank loops on threads of this process behind real rings and a real page: a deployment without processes."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from parallel.layout import Layout
from runtime.inbox import Inbox
from runtime.plan import PlanArrays, StepPlan, StepResult, decode_section
from runtime.rank_channel import RankChannel
from runtime.rank_loop import RankLoop, Served
from runtime.rank_watch import Patience, RankWatch, rank_names
from runtime.result_codec import encode_result
from runtime.ring import RingReader, RingWriter, create_segment
from runtime.vitals import RankVitals, Vitals, page_size

QUICK = Patience(stall_s=0.6, grace_s=0.1, connection_grace_s=0.2, step_s=60.0)


def empty_plan(step_id: int, slots: tuple[int, ...] = ()) -> StepPlan:
    """A plan that is sound as bytes; `slots` tell one group's from another's."""
    arrays: dict[str, Any] = {f.name: np.zeros(0, np.int32) for f in fields(PlanArrays)}
    for name in ("num_tokens", "starts", "kv_bounds", "samples", "carries"):
        arrays[name] = np.zeros(len(slots), np.int32)
    arrays |= {
        "slots": np.array(slots, np.int32), "new_cu_tokens": np.zeros(1, np.int32),
        "new_params": np.zeros(0, np.uint8), "new_bias_values": np.zeros(0, np.float32),
    }
    return StepPlan(
        step_id=step_id, k=0, num_verify=len(slots), num_logprobs=-1, split=False, arrays=PlanArrays(**arrays)
    )


@dataclass
class FakeProcess:
    """A process that lives until `code` is set or it is killed."""

    pid: int = field(default_factory=os.getpid)
    code: int | None = None
    killed: bool = False

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or 0.0)
        while self.code is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("fake", timeout or 0.0)
            time.sleep(0.01)
        return self.code

    def kill(self) -> None:
        self.killed, self.code = True, -9


@dataclass
class Echo:
    """Answers a plan with its slots as token ids and its own rank as count."""

    rank: int
    dp_rank: int
    before: Callable[[int, int], None]  # (rank, step)
    allocated: list[tuple[int, int]] = field(default_factory=list)
    closed: bool = False

    @property
    def facts(self) -> Mapping[str, int]:
        return {"num_pages": 10 + self.rank}

    def allocate(self, *, max_model_len: int, num_pages: int) -> None:
        self.allocated.append((max_model_len, num_pages))

    def run(self, plans: memoryview, publish: Callable[[bytes], None]) -> None:
        plan = decode_section(plans, self.dp_rank)
        self.before(self.rank, plan.step_id)
        rows = len(plan.arrays.slots)
        result = StepResult(
            step_id=plan.step_id, counts=np.full(rows, self.rank, np.int32),
            token_ids=plan.arrays.slots.reshape(rows, 1), bad=np.zeros(rows, np.bool_),
        )
        publish(encode_result(result))

    def take_digests(self) -> dict[str, int] | None:
        return None

    def close(self) -> None:
        self.closed = True


@dataclass
class ThreadRanks:
    """One deployment. `before` runs in a rank ahead of each step and may raise; `build` stands in for loading."""

    layout: Layout
    before: Callable[[int, int], None] = lambda rank, step: None
    build: Callable[[Echo], Served] = lambda echo: echo
    patience: Patience = QUICK

    def __post_init__(self) -> None:
        num_ranks, names = self.layout.ep, rank_names(self.layout)
        plans_fd, page = create_segment("plans", 1 << 16), os.memfd_create("lockstep-test-page")
        os.ftruncate(page, page_size(num_ranks))
        result_fds = [create_segment(f"results-{rank}", 1 << 16) for rank in range(num_ranks)]
        plans = RingWriter(plans_fd, "plans", names)
        self.processes = [FakeProcess() for _ in range(num_ranks)]
        self.echoes = [Echo(rank, self.layout.dp_rank(rank), self.before) for rank in range(num_ranks)]
        self.vitals = [RankVitals(page, rank) for rank in range(num_ranks)]
        loops = []
        for rank, fd in enumerate(result_fds):
            results = RingWriter(fd, f"results {rank}", ["controller"])
            loops.append(RankLoop(
                RingReader(plans_fd, rank), results, self.vitals[rank], is_leader=self.layout.tp_rank(rank) == 0,
                debug=False,
            ))
        vitals = Vitals(page, num_ranks)
        self.channel = RankChannel(
            self.layout, plans, [Inbox(fd) for fd in result_fds], vitals,
            RankWatch(names, self.processes, vitals, self.patience), step_timeout_s=self.patience.step_s,
        )
        self._threads = [threading.Thread(target=self._serve, args=(r, loop)) for r, loop in enumerate(loops)]
        for fd in (plans_fd, page, *result_fds):
            os.close(fd)
        for thread, vital in zip(self._threads, self.vitals, strict=True):
            vital.start()
            thread.start()

    def join(self) -> None:
        """Wait for the threads; the channel must have been closed, or have failed."""
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        for vital in self.vitals:
            vital.close()

    def _serve(self, rank: int, loop: RankLoop) -> None:
        ended_well = loop.serve(lambda: self.build(self.echoes[rank]))
        if self.processes[rank].code is None:
            self.processes[rank].code = 0 if ended_well else 1
