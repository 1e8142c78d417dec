"""Workers started by torchrun: it sees nothing of a rank's death, and starts keepers again that have died."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.launch.cluster_driver import FakeCluster
from tests.launch.dying import children

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES", "LOCKSTEP_LAUNCHER")


def torchrun(port: int, *options: str) -> Callable[[int, Sequence[str], Mapping[str, str]], subprocess.Popen[bytes]]:
    """Starts a node of one rank each, two nodes in all."""

    def start(rank: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        python, *rest = command
        launcher = [
            python, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1",
            "--master-addr=127.0.0.1", f"--master-port={port}", "--local-addr=127.0.0.1", *options,
        ]
        variables = {name: value for name, value in environment.items() if name not in OURS}
        return subprocess.Popen([*launcher, *rest], env=variables, stdin=subprocess.DEVNULL)

    return start


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def keeper(cluster: FakeCluster, rank: int) -> int:
    """torchrun's child."""
    (pid,) = children(cluster.local.workers[rank].pid)
    return pid


@pytest.mark.slow
def test_torchrun_sees_nothing_of_a_ranks_death() -> None:
    cluster = FakeCluster()
    cluster.local.start_worker = torchrun(free_port())
    with cluster:
        cluster.steps(3)
        keepers = [keeper(cluster, rank) for rank in range(2)]
        cluster.kill(1)
        assert cluster.failure().startswith("rank 1 (dp 1, tp 0) was killed by SIGKILL")
        cluster.recover()
        cluster.steps(3)
        assert [keeper(cluster, rank) for rank in range(2)] == keepers
        cluster.channel.close()
        assert cluster.local.wait(30.0) == {0: 0, 1: 0}


@pytest.mark.slow
def test_torchrun_starts_keepers_again() -> None:
    cluster = FakeCluster()
    cluster.local.start_worker = torchrun(free_port(), "--max-restarts=1", "--monitor-interval=0.2")
    with cluster:
        cluster.steps(3)
        os.kill(keeper(cluster, 1), signal.SIGKILL)
        assert cluster.failure()
        cluster.recover()
        cluster.steps(3)
        cluster.channel.close()
        assert cluster.local.wait(30.0) == {0: 0, 1: 0}
