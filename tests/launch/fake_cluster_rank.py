"""A rank of a cluster without a model: `python -m tests.launch.fake_cluster_rank` imports no torch.

It answers every step as tests/launch/fake_rank.py does. FAKE_CLUSTER_RANK=RANK:EPOCH:STEP:WHAT,... has it do something
else once in an epoch: raise, refuse, lose, wait, hang, exit, or a signal by name; step 0 is when it joins.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable, Mapping

from launch.rank_epochs import ClusterRankSpec, Member, main
from parallel.abort import AbortSignal
from runtime.cluster.keeper_messages import RankJoin
from runtime.rank_loop import Served
from runtime.vitals import RankVitals, text_field
from tests.launch.fake_rank import result_bytes

SCRIPT = "FAKE_CLUSTER_RANK"


class FakeMember:
    def __init__(self, spec: ClusterRankSpec, abort: AbortSignal) -> None:
        self._spec, self._abort = spec, abort

    @property
    def port(self) -> int:
        return 20_000 + self._spec.rank

    def join(self, join: RankJoin, segments: Mapping[str, int], vitals: RankVitals) -> Served:
        assert join.ports == [20_000 + rank for rank in range(self._spec.world_size)], join
        return FakeServed(self._spec, join, vitals, self._abort)

    def leave(self) -> None:
        """There is nobody to leave."""


class FakeServed:
    """`bytes_read` of its facts is its process id, so that tests can tell survivors from replacements."""

    def __init__(self, spec: ClusterRankSpec, join: RankJoin, vitals: RankVitals, abort: AbortSignal) -> None:
        self._spec, self._vitals, self._abort = spec, vitals, abort
        self._step, self._what = -1, ""
        for part in filter(None, os.environ.get(SCRIPT, "").split(",")):
            rank, epoch, step, what = part.split(":")
            if (int(rank), int(epoch)) == (spec.rank, join.epoch):
                self._step, self._what = int(step), what
        self._steps = 0
        self._act()

    @property
    def facts(self) -> Mapping[str, int]:
        return {"num_pages": 100 + self._spec.rank, "capacity": 64, "bytes_read": os.getpid()}

    def allocate(self, *, max_model_len: int, num_pages: int) -> None:
        assert num_pages == 100, num_pages

    def run(self, plans: memoryview, publish: Callable[[bytes], None]) -> None:
        self._vitals.phase("target")
        self._steps += 1
        self._act()
        num_groups = self._spec.world_size // self._spec.tp
        _, _, _, step_id = struct.unpack_from("<4sHHq", plans, 8 * (1 + num_groups))  # see runtime/plan.py
        publish(result_bytes(step_id, self._spec.rank))

    def take_digests(self) -> dict[str, int] | None:
        return None

    def close(self) -> None:
        """The process ends next."""

    def _act(self) -> None:
        if self._steps != self._step:
            return
        if self._what == "raise":
            raise KeyError("not\nthere")
        if self._what == "refuse":
            raise ValueError("tensor w is missing from model.safetensors")
        if self._what == "lose":
            self._vitals.waiting(text_field("all_to_all on ep"))
            raise RuntimeError("Connection closed by peer")
        if self._what == "wait":  # in a collective that never ends
            self._vitals.waiting(text_field("all_gather on tp"))
            while True:
                self._abort.raise_if_set()
                time.sleep(0.02)
        if self._what == "hang":
            time.sleep(600)
        if self._what == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, self._what))


def make(spec: ClusterRankSpec, abort: AbortSignal) -> Member:
    return FakeMember(spec, abort)


if __name__ == "__main__":
    main(make)
