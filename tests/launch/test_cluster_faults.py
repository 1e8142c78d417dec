"""Ranks, relays and keepers that die or stand still: named at once, replaced, and nobody else is touched."""

from __future__ import annotations

import os
import select
import signal

import pytest

from runtime.recovery import CannotRecover
from tests.launch.cluster_driver import FAKE, FakeCluster
from tests.launch.dying import is_running, wait_until


def test_a_spare_takes_the_place_of_a_rank_and_survivors_stay() -> None:
    with FakeCluster() as cluster:
        cluster.steps(3)
        cluster.wait_for_spares()
        first = cluster.pids
        (spare,) = set(cluster.find(1, FAKE)) - {first[1]}
        os.kill(first[1], signal.SIGKILL)
        assert cluster.failure().startswith("rank 1 (dp 1, tp 0) was killed by SIGKILL in phase")
        cluster.recover()
        assert cluster.pids == [first[0], spare]
        cluster.steps(3)

        os.kill(first[0], signal.SIGSTOP)
        assert cluster.failure().startswith("rank 0 (dp 0, tp 0) has shown no sign of life for 1.5 s")
        cluster.recover()
        assert first[0] not in cluster.pids
        assert cluster.pid(1) == spare
        assert not is_running(first[0]), "one that stands still is killed"
        cluster.steps(3)
        cluster.channel.close()
        assert cluster.local.wait() == {0: 0, 1: 0}


def test_a_relay_is_replaced_and_no_rank_is() -> None:
    with FakeCluster(stall_s=1.0) as cluster:
        ranks, relays = cluster.pids, [cluster.relay(0), cluster.relay(1)]
        os.kill(relays[0], signal.SIGKILL)
        assert cluster.failure().startswith("relay of node 0: ")
        cluster.recover()
        cluster.steps(3)
        os.kill(relays[1], signal.SIGSTOP)
        assert cluster.failure().startswith("relay of node 1: no sign of life for 1.")
        cluster.recover()
        cluster.steps(3)
        assert cluster.pids == ranks
        assert not {cluster.relay(0), cluster.relay(1)} & set(relays)
        assert not is_running(relays[1])


def test_a_relay_that_is_replaced_while_the_controller_is_away_is_noticed() -> None:
    with FakeCluster() as cluster:
        cluster.steps(3)
        ranks = cluster.pids
        os.kill(cluster.relay(0), signal.SIGKILL)
        arrived = cluster.local.controller._acceptor.fileno()
        assert select.select([arrived], [], [], 20.0)[0], "the next relay has not come"
        assert cluster.failure() == "relay of node 0 is gone"
        cluster.recover()
        cluster.steps(3)
        assert cluster.pids == ranks


def test_a_keeper_takes_its_rank_with_it_and_another_may_come() -> None:
    with FakeCluster() as cluster:
        cluster.steps(3)
        first, worker = cluster.pids, cluster.local.workers[1]
        worker.kill()
        worker.wait()
        assert cluster.failure()  # the relay, the rank or the keeper, whichever was noticed first
        assert wait_until(lambda: not is_running(first[1]), 5.0)
        cluster.local.start(1)
        cluster.recover()
        assert cluster.pid(0) == first[0]
        assert cluster.pid(1) != first[1]
        cluster.steps(3)


def test_a_keeper_that_is_replaced_while_the_controller_is_away_is_welcome() -> None:
    with FakeCluster("cluster.reform_s=10", stall_s=10.0) as cluster:
        cluster.steps(3)
        first = cluster.pids
        for _ in range(2):
            worker = cluster.local.workers[1]
            worker.kill()
            worker.wait()
            cluster.local.start(1)
            assert wait_until(lambda: bool(cluster.find(1, FAKE)), 20.0), "the next keeper has not come"
        assert cluster.failure()  # within the 10 s in which the first one does not count as silent
        cluster.recover()
        assert cluster.pid(0) == first[0]
        cluster.steps(3)


def test_without_a_replacement_there_is_no_recovery() -> None:
    with FakeCluster("cluster.reform_s=1") as cluster:
        cluster.local.workers[1].kill()
        cluster.failure()
        with pytest.raises(CannotRecover, match=r"not all ranks are there after 1 s: rank 1: its keeper on .* is gone"):
            cluster.recover()
        cluster.channel.close()
        assert cluster.local.wait()[0] == 69


def test_what_stands_still_outside_of_an_epoch_is_replaced_too() -> None:
    with FakeCluster(stall_s=0.5) as cluster:
        cluster.wait_for_spares()
        first = cluster.pids
        (spare,) = set(cluster.find(1, FAKE)) - {first[1]}
        os.kill(spare, signal.SIGSTOP)
        assert wait_until(lambda: not is_running(spare), 10.0), "a spare that cannot take over is of no use"

        (spare,) = set(cluster.find(0, FAKE)) - {first[0]}
        os.kill(spare, signal.SIGSTOP)
        cluster.kill(0)
        assert cluster.failure()
        cluster.recover()
        assert cluster.pid(0) not in (first[0], spare)
        cluster.steps(3)
