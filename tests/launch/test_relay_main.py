"""The relay as a process: it ends with its keeper and with its line, says why in its exit code, and can be replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from launch.exit_codes import EXIT_CONFIG, EXIT_PEER_LOST
from launch.relay_main import RelaySpec
from runtime.cluster.grants import fetch_grant, relay_socket_name
from runtime.cluster.line import LineError, accept_line
from runtime.cluster.relay_hub import RelayFault, RelayHub, read_hello
from runtime.cluster.relay_messages import EpochMemory
from runtime.liveness import ProcessId
from runtime.ring import ReaderDead, RingReader, RingWriter, WriterDead
from tests.runtime.cluster.line_pair import SECRET, listening

SOON_S = 10.0  # a process starts
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "launch.relay_main"]


class Launched:
    """One node: a hub, and relay processes that come and go."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.listener = stack.enter_context(listening())
        self.listener.settimeout(SOON_S)
        self.host, self.port = self.listener.getsockname()
        self.socket_name = relay_socket_name(f"{self.host}:{self.port}", 0)
        self.hub = RelayHub(stall_s=0.8)
        stack.callback(self.hub.close)

    def spec(self, *, secret: bytes = SECRET, parent_pid: int = 0) -> bytes:
        return RelaySpec(
            parent_pid=parent_pid or os.getpid(), node_rank=0, controller_host=self.host, controller_port=self.port,
            secret=secret.hex(), socket_name=self.socket_name, host="n0",
        ).to_json()

    def start(self, spec: bytes) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
        self.stack.callback(_end, process)
        assert process.stdin is not None
        process.stdin.write(spec)
        process.stdin.close()
        return process

    def attach(self) -> int:
        """Take in the next relay that connects; its pid."""
        line, _ = accept_line(self.listener.accept()[0], secret=SECRET, timeout_s=SOON_S)
        hello = read_hello(line, SOON_S)
        assert (hello.node_rank, hello.host) == (0, "n0")
        self.hub.attach(0, line)
        return hello.pid

    def fault(self) -> RelayFault:
        deadline = time.monotonic() + SOON_S
        while (fault := self.hub.fault()) is None:
            assert time.monotonic() < deadline
            self.hub.poll(0.02)
        return fault


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def said(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return process.stderr.read().decode()


@pytest.fixture
def node() -> Iterator[Launched]:
    with ExitStack() as stack:
        yield Launched(stack)


def memory(epoch: int) -> EpochMemory:
    return EpochMemory(epoch=epoch, node_of_rank=[0], plan_bytes=1000, result_bytes=1000)


def test_killed_stopped_and_replaced(node: Launched) -> None:
    first = node.start(node.spec())
    assert node.attach() == first.pid
    ports = node.hub.open_epoch(memory(1))
    node.hub.wait_open(SOON_S)
    grant = fetch_grant(node.socket_name, epoch=1, rank=0, timeout_s=SOON_S)
    plans, results = RingReader(grant.plans_fd, 0), RingWriter(grant.results_fd, "results", ["controller"])
    grant.close()
    ports.plans.send(b"plan", SOON_S)
    assert plans.receive(SOON_S) == b"plan"
    results.send(b"result", SOON_S)
    assert ports.results[0].receive(SOON_S) == b"result"

    first.kill()
    assert "has closed the line" in node.fault().text or "broken" in node.fault().text
    assert first.wait(SOON_S) == -signal.SIGKILL
    with pytest.raises(WriterDead):
        plans.receive(SOON_S)
    with pytest.raises(ReaderDead):
        results.check_readers()
    plans.close()
    results.close()

    second = node.start(node.spec())
    assert node.attach() == second.pid
    assert node.hub.fault() is None
    node.hub.open_epoch(memory(2))
    node.hub.wait_open(SOON_S)
    fetch_grant(node.socket_name, epoch=2, rank=0, timeout_s=SOON_S).close()

    second.send_signal(signal.SIGSTOP)
    assert node.fault().text.startswith("relay of node 0: no sign of life for 0.")
    node.hub.detach(0)
    second.send_signal(signal.SIGCONT)
    assert second.wait(SOON_S) == EXIT_PEER_LOST
    assert said(second) == ""


def test_it_ends_with_its_keeper(node: Launched) -> None:
    """The keeper is killed, so it can tell nobody anything: Linux ends the relay."""
    code = (
        f"import subprocess, sys, time; p = subprocess.Popen({COMMAND!r}, stdin=subprocess.PIPE);"
        "import os; spec = sys.stdin.buffer.read().replace(b'123456789', str(os.getpid()).encode());"
        "p.stdin.write(spec); p.stdin.close(); time.sleep(60)"
    )
    keeper = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    node.stack.callback(_end, keeper)
    assert keeper.stdin is not None
    keeper.stdin.write(node.spec(parent_pid=123456789))
    keeper.stdin.close()
    relay = ProcessId.of(node.attach())
    assert relay.pid != keeper.pid
    keeper.kill()
    assert node.fault().node_rank == 0
    deadline = time.monotonic() + SOON_S
    while relay.is_alive():  # its sockets go before it does
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_another_secret_is_not_tried_again(node: Launched) -> None:
    process = node.start(node.spec(secret=b"another"))
    with pytest.raises(LineError):
        accept_line(node.listener.accept()[0], secret=SECRET, timeout_s=SOON_S)
    assert process.wait(SOON_S) == EXIT_CONFIG
    assert said(process) == (
        f"relay of node 0: controller at {node.host}:{node.port} does not know our secret: set the same "
        "LOCKSTEP_SECRET on both sides\n"
    )


def test_a_relay_imports_no_torch() -> None:
    code = "import sys, launch.relay_main; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT).strip() == b"False False"
