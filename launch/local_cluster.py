"""A whole cluster on this machine: the controller in this process, and workers as children that play several nodes.

For tests, and for trying a configuration out: everything is as on several hosts but the network between them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.cluster_address import SECRET_VARIABLE
from launch.config import LaunchConfig, load_config
from launch.controller import Controller
from launch.keeper_children import RANK_MODULE, RELAY_MODULE
from runtime.engine import Deployment

END_S = 10.0  # how long workers may take to end once they were told

StartWorker = Callable[[int, Sequence[str], Mapping[str, str]], "subprocess.Popen[bytes]"]


@dataclass(kw_only=True)
class LocalCluster:
    """`ranks_per_node`: how many ranks each node has, in order. Use as a context; `deploy` gives what an engine needs.

    `start_worker(rank, command, environment)` may start a worker elsewhere, for example in a network namespace.
    """

    config: Path | None
    ranks_per_node: Sequence[int]
    overrides: Sequence[str] = ()
    rank_module: str = RANK_MODULE
    relay_module: str = RELAY_MODULE
    environment: Mapping[str, str] = field(default_factory=dict)
    listen: str | None = None
    start_worker: StartWorker | None = None
    workers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)  # by rank

    def __post_init__(self) -> None:
        self.launch_config: LaunchConfig = load_config(self.config, self.overrides)
        self.engine_config = self.launch_config.engine_config()
        self.controller = Controller(self.launch_config, self.engine_config, listen=self.listen)

    def deploy(self, *, gather_s: float = 60.0) -> Deployment:
        """Start the workers and wait for the first epoch. Raises like `Controller.deploy`; close it in either case."""
        for rank in range(sum(self.ranks_per_node)):
            self.start(rank)
        return self.controller.deploy(gather_s=gather_s)

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        """Start the worker of a rank, for the first time or once it has ended."""
        command = [
            sys.executable, "-m", "launch.worker", "--controller", self.controller.address,
            "--rank-module", self.rank_module, "--relay-module", self.relay_module,
        ]
        command += ["--config", str(self.config)] if self.config is not None else []
        command += [part for override in self.overrides for part in ("--set", override)]
        environment = {**os.environ, **self._variables(rank), **self.environment}
        before = self.workers.get(rank)
        assert before is None or before.poll() is not None, f"rank {rank} has a worker"
        worker = self.workers[rank] = (self.start_worker or _start)(rank, command, environment)
        return worker

    def node_of(self, rank: int) -> int:
        node = 0
        while rank >= sum(self.ranks_per_node[: node + 1]):
            node += 1
        return node

    def wait(self, timeout_s: float = END_S) -> dict[int, int]:
        """Exit codes of all workers, by rank. Raises subprocess.TimeoutExpired for one that has not ended in time."""
        return {rank: worker.wait(timeout_s) for rank, worker in sorted(self.workers.items())}

    def close(self) -> None:
        """End what is left: the controller tells the workers; who does not listen is killed. May be called twice."""
        self.controller.close()
        for worker in self.workers.values():
            try:
                worker.wait(END_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    worker.send_signal(signal.SIGKILL)
                worker.wait()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _variables(self, rank: int) -> dict[str, str]:
        """What a launcher would set."""
        node = self.node_of(rank)
        first = sum(self.ranks_per_node[:node])
        root = str(Path(__file__).resolve().parent.parent)
        variables = {
            "RANK": rank, "WORLD_SIZE": sum(self.ranks_per_node), "LOCAL_RANK": rank - first,
            "LOCAL_WORLD_SIZE": self.ranks_per_node[node], "NODE_RANK": node, "NNODES": len(self.ranks_per_node),
            "LOCKSTEP_LAUNCHER": "manual",
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        }
        values = {name: str(value) for name, value in variables.items()}
        if SECRET_VARIABLE in os.environ:
            values[SECRET_VARIABLE] = os.environ[SECRET_VARIABLE]
        return values


def _start(_rank: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL)
