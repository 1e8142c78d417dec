"""What ranks raise in a cluster: their own errors end them, the others' end only the epoch."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from launch.exit_codes import EXIT_CONFIG, EXIT_ENGINE, EXIT_PEER_LOST
from runtime.channel import RankFailure
from tests.launch.cluster_driver import FakeCluster

ONE_EPOCH_AFTER_THE_OTHER = "0:1:2:lose,1:2:2:raise,0:3:2:wait,0:4:0:exit"


def test_only_who_is_at_fault_is_replaced() -> None:
    with FakeCluster(script=ONE_EPOCH_AFTER_THE_OTHER) as cluster:
        first = cluster.pids
        assert "RuntimeError: Connection closed by peer" in cluster.failure()
        cluster.recover()
        assert cluster.pids == first, "who has lost the others is sound"

        message = "rank 1 (dp 1, tp 0) failed in phase 'target' of step {}: KeyError: 'not\\nthere'"
        step = cluster.next_step + 1
        assert cluster.failure() == message.format(step)
        cluster.recover()
        assert cluster.pid(0) == first[0]
        assert cluster.pid(1) != first[1]

        cluster.steps(1)
        second = cluster.pids
        cluster.channel.send(cluster.plans())  # rank 0 waits in it, as if in a collective
        cluster.kill(1)
        assert cluster.failure().startswith("rank 1 (dp 1, tp 0) was killed by SIGKILL")
        with pytest.raises(RankFailure, match=r"^rank 0 \(dp 0, tp 0\) exited with code 7"):
            cluster.recover()  # rank 0 was called out of it, and ends when it joins again
        cluster.recover()
        assert not set(second) & set(cluster.pids)
        cluster.steps(3)


def test_processes_that_never_come_up_end_the_start_everywhere() -> None:
    cluster = FakeCluster()
    cluster.local.rank_module = "tests.launch.there_is_no_such_module"
    told = r"^rank \d has left before the start: 3 processes in a row ended while they started, the last with exit"
    with closing(cluster.local):
        with pytest.raises(RankFailure, match=f"{told} code 1$"), cluster:
            pass
        assert set(cluster.local.wait().values()) <= {EXIT_ENGINE, EXIT_PEER_LOST}


def test_a_worker_that_comes_when_another_has_left_is_told() -> None:
    """It would look for the controller for as long as one may be late."""
    cluster = FakeCluster()
    cluster.local.rank_module = "tests.launch.there_is_no_such_module"
    start = cluster.local.start

    def start_late(rank: int) -> object:
        if rank == 1:
            threading.Timer(4.0, start, (1,)).start()
            return None
        return start(rank)

    with closing(cluster.local):
        cluster.local.start = start_late  # type: ignore[assignment, method-assign]
        with pytest.raises(RankFailure, match="^rank 0 has left before the start"), cluster:
            pass
        assert cluster.local.wait() == {0: EXIT_ENGINE, 1: EXIT_PEER_LOST}


def test_a_mistake_that_a_rank_finds_ends_the_start_everywhere() -> None:
    cluster = FakeCluster(script="1:1:0:refuse")
    with closing(cluster.local):
        with pytest.raises(ValueError, match=r"^rank 1 \(dp 1, tp 0\): tensor w is missing"), cluster:
            pass
        assert cluster.local.wait() == {0: EXIT_CONFIG, 1: EXIT_CONFIG}
