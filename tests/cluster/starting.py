"""How workers are started: by a shell that plays the launcher, or in network namespaces.

In namespaces the switch between them is a child, and the program runs again inside the first one.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launch.cluster_address import SECRET_VARIABLE

READY = b"ready"


def in_namespaces(switch: Path, num_nodes: int, delay_ms: float, module: str, arguments: Sequence[str]) -> int:
    """Start the switch, run `python -m module ... --network-fd FD` in namespace lk0, and take everything down.

    FD takes the switch's commands, one a line. Returns the exit code.
    """
    command = [sys.executable, str(switch), "--hosts", str(num_nodes), "--delay-ms", str(delay_ms)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        while line := process.stderr.readline():
            if READY in line:
                break
        else:
            raise RuntimeError(f"{switch} ended with code {process.wait()}: are you root?")
        fd = process.stdin.fileno()
        inner = ["ip", "netns", "exec", "lk0", sys.executable, "-m", module, *arguments, "--network-fd", str(fd)]
        environment = {**os.environ, SECRET_VARIABLE: secrets.token_hex(16)}
        return subprocess.run(inner, pass_fds=[fd], env=environment, check=False).returncode
    finally:
        process.send_signal(signal.SIGINT)  # it takes the namespaces down
        process.stdin.close()
        process.wait()
        process.stderr.close()


def start_worker_by_shell(
    _rank: int, command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """For `LocalCluster.start_worker`: a process that starts the worker and waits for it, as launchers do."""
    shell = ["sh", "-c", '"$@"; exit $?', "launcher", *command]
    return subprocess.Popen(shell, env={**os.environ, **environment}, stdin=subprocess.DEVNULL)


def start_worker_in_namespace(
    ranks_per_node: Sequence[int],
) -> Callable[[int, Sequence[str], Mapping[str, str]], subprocess.Popen[bytes]]:
    """For `LocalCluster.start_worker`: a worker in the namespace of its node, reached under that node's address."""
    node_of = [node for node, count in enumerate(ranks_per_node) for _ in range(count)]

    def start(rank: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        node = node_of[rank]
        inside = ["ip", "netns", "exec", f"lk{node}", *command]
        variables = {**os.environ, **environment, "LOCKSTEP_ADVERTISE": f"10.77.0.{node + 1}"}
        return subprocess.Popen(inside, env=variables, stdin=subprocess.DEVNULL)

    return start
