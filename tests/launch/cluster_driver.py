"""Drives a cluster of ranks without a model (tests/launch/fake_cluster_rank.py), and finds its processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from launch.local_cluster import LocalCluster
from runtime.channel import RankFailure
from runtime.plan import StepPlan
from runtime.rank_channel import RankChannel
from tests.launch.dying import children, wait_until
from tests.runtime.served_threads import empty_plan

FAKE = "tests.launch.fake_cluster_rank"
# Sources may change while a test runs, and with them the digest that nodes compare.
ANY_SOURCE = 'cluster.may_differ=["lockstep"]'


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


class FakeCluster:
    """Two nodes of one rank each unless said otherwise; every rank is a dp group of its own."""

    def __init__(
        self, *overrides: str, ranks_per_node: Sequence[int] = (1, 1), stall_s: float = 1.5, script: str = ""
    ) -> None:
        self.num_ranks = sum(ranks_per_node)
        settings = [f"parallel.dp={self.num_ranks}", f"cluster.stall_s={stall_s}", ANY_SOURCE, *overrides]
        self.local = LocalCluster(
            config=None, ranks_per_node=ranks_per_node, overrides=settings, rank_module=FAKE,
            environment={"FAKE_CLUSTER_RANK": script} if script else {},
        )
        self.next_step = 1

    def __enter__(self) -> FakeCluster:
        self.deployment = self.local.deploy()
        assert isinstance(self.deployment.channel, RankChannel)
        self.channel = self.deployment.channel
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
        self.local.close()

    def pid(self, rank: int) -> int:
        """Of the rank's process in this epoch, as it says itself."""
        return self.channel.facts[rank]["bytes_read"]

    @property
    def pids(self) -> list[int]:
        return [self.pid(rank) for rank in range(self.num_ranks)]

    def find(self, rank: int, what: str) -> list[int]:
        """Children of a rank's keeper with `what` in their command lines."""
        return [pid for pid in children(self.local.workers[rank].pid) if what in command_of(pid)]

    def relay(self, rank: int) -> int:
        (pid,) = self.find(rank, "relay_main")
        return pid

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), number)

    def plans(self) -> list[StepPlan]:
        """Of the next step."""
        self.next_step += 1
        return [empty_plan(self.next_step - 1, (1,))] * self.num_ranks

    def steps(self, count: int) -> None:
        """Every step is answered by every rank with the step and its own number."""
        for _ in range(count):
            self.channel.send(self.plans())
            results = self.channel.receive()
            ids = [result.token_ids.tolist() for result in results]
            assert ids == [[[self.next_step - 1, rank]] for rank in range(self.num_ranks)]

    def failure(self, within_s: float = 20.0) -> str:
        """Step until a rank or relay fails; what is said of it."""
        until = time.monotonic() + within_s
        try:
            while time.monotonic() < until:
                self.steps(1)
                time.sleep(0.001)
        except RankFailure as failure:
            return str(failure)
        raise AssertionError("nothing failed")

    def recover(self) -> None:
        assert self.deployment.recover is not None
        channel = self.deployment.recover()
        assert isinstance(channel, RankChannel)
        self.channel = channel

    def wait_for_spares(self) -> None:
        """Until every keeper has two processes of its rank."""
        ranks = range(self.num_ranks)
        assert wait_until(lambda: all(len(self.find(rank, FAKE)) == 2 for rank in ranks), 10.0)
