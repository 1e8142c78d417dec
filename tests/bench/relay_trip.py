"""What a step's way costs: plan out, result back, over a ring alone and through a relay process on this machine.

    python tests/bench/relay_trip.py --rounds 500

The rank answers every plan with its first 300 bytes. Figures in microseconds. Between two rounds lies a millisecond.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from launch.relay_main import RelaySpec
from runtime.cluster.grants import fetch_grant, relay_socket_name
from runtime.cluster.line import accept_line
from runtime.cluster.relay_hub import RelayHub, read_hello
from runtime.cluster.relay_messages import EpochMemory
from runtime.inbox import Inbox
from runtime.ring import RingError, RingReader, RingTimeout, RingWriter, create_segment

ROOT = Path(__file__).resolve().parent.parent.parent
PLAN_BYTES, RESULT_BYTES, ANSWER_BYTES = 1 << 20, 1 << 16, 300
SIZES = (400, 4_000, 65_536)
SOON_S = 10.0

Send = Callable[[bytes], None]
Receive = Callable[[], bytes | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        socket_name, plans_fd, results_fd = options.rank
        _be_rank(socket_name, int(plans_fd), int(results_fd))
        return
    for name, way in (("ring", ring_alone), ("relay", through_relay)):
        with way() as (send, receive):
            for size in SIZES:
                measure(f"{name:6} {size:6} bytes", bytes(size), send, receive, options.rounds)


def measure(name: str, plan: bytes, send: Send, receive: Receive, rounds: int) -> None:
    """Print quantiles of the time from sending a plan to having its result."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        send(plan)
        assert receive() is not None
        took.append((time.perf_counter() - began) * 1e6)
        time.sleep(0.001)
    took.sort()
    shown = "  ".join(f"p{share} {took[rounds * share // 100]:6.0f}" for share in (50, 90, 99))
    print(f"{name}  {shown}")


@contextmanager
def ring_alone() -> Iterator[tuple[Send, Receive]]:
    """As on one machine today."""
    with ExitStack() as stack:
        plans_fd, results_fd = create_segment("plans", PLAN_BYTES), create_segment("results", RESULT_BYTES)
        writer = stack.enter_context(RingWriter(plans_fd, "plans", ["rank 0"]))
        rank = _start_rank("", plans_fd, results_fd)
        stack.callback(rank.wait)
        stack.callback(writer.close)
        inbox = Inbox(results_fd)
        stack.callback(inbox.close)
        while inbox.try_receive() is None:
            time.sleep(0.01)
        yield lambda plan: writer.send(plan, SOON_S), lambda: inbox.receive(SOON_S)


@contextmanager
def through_relay() -> Iterator[tuple[Send, Receive]]:
    """As on several hosts, without the network between them."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        host, port = listener.getsockname()
        socket_name = relay_socket_name(f"{host}:{port}", 0)
        spec = RelaySpec(
            parent_pid=os.getpid(), node_rank=0, controller_host=host, controller_port=port, secret="",
            socket_name=socket_name, host="here",
        )
        relay = subprocess.Popen([sys.executable, "-m", "launch.relay_main"], stdin=subprocess.PIPE, cwd=ROOT)
        stack.callback(relay.wait)
        assert relay.stdin is not None
        relay.stdin.write(spec.to_json())
        relay.stdin.close()
        hub = RelayHub()
        stack.callback(hub.close)
        line, _ = accept_line(listener.accept()[0], secret=b"", timeout_s=SOON_S)
        hub.attach(read_hello(line, SOON_S).node_rank, line)
        ports = hub.open_epoch(
            EpochMemory(epoch=1, node_of_rank=[0], plan_bytes=PLAN_BYTES, result_bytes=RESULT_BYTES)
        )
        hub.wait_open(SOON_S)
        rank = _start_rank(socket_name, -1, -1)
        stack.callback(rank.wait)
        stack.callback(ports.plans.close)
        assert ports.results[0].receive(SOON_S) is not None
        yield lambda plan: ports.plans.send(plan, SOON_S), lambda: ports.results[0].receive(SOON_S)


def _start_rank(socket_name: str, plans_fd: int, results_fd: int) -> subprocess.Popen[bytes]:
    told = [socket_name.lstrip("\0"), str(plans_fd), str(results_fd)]
    return subprocess.Popen(
        [sys.executable, __file__, "--rank", *told], pass_fds=[fd for fd in (plans_fd, results_fd) if fd >= 0]
    )


def _be_rank(socket_name: str, plans_fd: int, results_fd: int) -> None:
    if socket_name:
        grant = fetch_grant("\0" + socket_name, epoch=1, rank=0, timeout_s=SOON_S)
        plans_fd, results_fd = grant.plans_fd, grant.results_fd
    plans, results = RingReader(plans_fd, 0), RingWriter(results_fd, "results", ["controller"])
    results.send(b"ready", SOON_S)
    while True:
        try:
            results.send(plans.receive(SOON_S)[:ANSWER_BYTES], SOON_S)
        except RingTimeout:
            continue
        except RingError:
            return


if __name__ == "__main__":
    main()
