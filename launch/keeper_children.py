"""The processes that a keeper starts: ranks, one of them a spare, and on the first local rank the node's relay."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launch.network import interface_of
from launch.rank_epochs import ClusterRankSpec
from runtime.cluster.fd_passing import receive_message, send_message
from runtime.cluster.keeper_messages import FromRank, ToRank, decode_from_rank, encode
from runtime.cluster.line_errors import LineError
from runtime.liveness import ProcessId

RANK_MODULE = "launch.rank_epochs"
RELAY_MODULE = "launch.relay_main"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
REAP_S = 5.0
STOPPED_STATES = "Tt"  # of /proc/PID/stat


class Child:
    """A process that can be waited for with select: `pidfd` is readable once it has ended."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self._stopped = float("inf")  # since when it was seen to be

    @property
    def pid(self) -> int:
        return self.process.pid

    def stopped_for(self, now: float) -> float | None:
        """For how many seconds it has been seen stopped (SIGSTOP, a debugger); None if it runs."""
        is_stopped = ProcessId.of(self.pid).state() in STOPPED_STATES
        self._stopped = min(self._stopped, now) if is_stopped else float("inf")
        return now - self._stopped if is_stopped else None

    def kill(self) -> None:
        self.process.kill()

    def reap(self) -> int:
        """The exit code of a process that has ended or was killed; its descriptors go."""
        code = self.process.wait(REAP_S)
        os.close(self.pidfd)
        return code


class RankChild(Child):
    """A rank or a spare: what is known of it, and the socket to it."""

    def __init__(self, serial: int, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        super().__init__(process)
        self.serial = serial
        self.socket = sock
        self.port = 0  # of its exchanges; 0 while it starts
        self.left = 0  # the last epoch it was in
        self.epoch = 0  # the epoch it was told to join, until it has left it
        self.hears = True  # whether something may come from it
        sock.setblocking(False)

    def tell(self, message: ToRank, fds: Sequence[int] = ()) -> None:
        with suppress(LineError, BlockingIOError):  # it has ended: its pidfd says so; or it stands still
            send_message(self.socket, encode(message), fds)

    def hear(self) -> FromRank | None:
        """The next message if there is one; `hears` is false after the last."""
        try:
            data, _ = receive_message(self.socket)
        except BlockingIOError:
            return None
        except LineError:
            self.hears = False
            return None
        return decode_from_rank(data)

    def reap(self) -> int:
        self.socket.close()
        return super().reap()


@dataclass(frozen=True, kw_only=True)
class ChildStarter:
    """Starts what one keeper looks after. `rank_module` and `relay_module` run as `python -m`."""

    spec: ClusterRankSpec
    relay_spec: bytes | None  # what a relay is told on standard input; None: another keeper of this node starts it
    rank_module: str = RANK_MODULE
    relay_module: str = RELAY_MODULE

    def start_rank(self, serial: int) -> RankChild:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            spec = replace(self.spec, parent_pid=os.getpid(), keeper_fd=theirs.fileno())
            arguments = [f"--rank={spec.rank}", f"--process={serial}"]  # for whoever reads a list of processes
            process = _start(self.rank_module, arguments, spec.to_json(), [theirs.fileno()], self._variables())
        return RankChild(serial, process, ours)

    def start_relay(self) -> Child | None:
        if self.relay_spec is None:
            return None
        return Child(_start(self.relay_module, [], self.relay_spec, [], self._variables()))

    def _variables(self) -> Mapping[str, str]:
        variables = {"OMP_NUM_THREADS": str(self.spec.threads)}
        interface = interface_of(self.spec.host)
        if interface is not None and GLOO_VARIABLE not in os.environ:  # gloo would ask for the address of our name
            variables[GLOO_VARIABLE] = interface
        return variables


def _start(
    module: str, arguments: Sequence[str], told: bytes, fds: Sequence[int], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """`python -m module` in this checkout or installation, deaf to Ctrl-C: that is the keeper's to answer."""
    root = str(Path(__file__).resolve().parent.parent)
    search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            env=os.environ | variables | {"PYTHONPATH": search}, pass_fds=list(fds),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already; its exit code says so
        process.stdin.write(told)
        process.stdin.close()
    return process
