"""Relays in threads of this process, a hub over real lines to them, and ranks that are a handful of ring ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from runtime.cluster.grants import GrantServer, fetch_grant, relay_socket_name
from runtime.cluster.line import FrameLine, LineError, accept_line, connect_line
from runtime.cluster.relay import Relay
from runtime.cluster.relay_hub import RelayHub, read_hello
from runtime.cluster.relay_messages import EpochMemory
from runtime.ring import RingReader, RingWriter
from runtime.vitals import RankVitals
from tests.runtime.cluster.line_pair import SECRET, SOON_S, listening

NODE_OF_RANK = [0, 1, 0, 1]  # ranks of a node need not be neighbours
PLAN_BYTES, RESULT_BYTES = 20_000, 5_000


def memory(epoch: int, node_of_rank: list[int] | None = None) -> EpochMemory:
    """Small rings for the ranks of this file."""
    return EpochMemory(
        epoch=epoch, node_of_rank=NODE_OF_RANK if node_of_rank is None else node_of_rank, plan_bytes=PLAN_BYTES,
        result_bytes=RESULT_BYTES,
    )


class RankEnds:
    """What a rank does with its grant."""

    def __init__(self, socket_name: str, epoch: int, rank: int) -> None:
        grant = fetch_grant(socket_name, epoch=epoch, rank=rank, timeout_s=SOON_S)
        self.plans = RingReader(grant.plans_fd, grant.reader_index)
        self.results = RingWriter(grant.results_fd, f"results of rank {rank}", ["controller"])
        self.vitals = RankVitals(grant.vitals_fd, grant.vitals_index)
        grant.close()

    def close(self) -> None:
        self.plans.close()
        self.results.close()
        self.vitals.close()


@dataclass
class World:
    """A hub with relays attached, and how to reach what they serve."""

    hub: RelayHub
    address: tuple[str, int]
    stack: ExitStack
    ends: list[str] = field(default_factory=list)  # what ended each relay

    def socket_name(self, node: int) -> str:
        host, port = self.address
        return relay_socket_name(f"{host}:{port}", node)

    def rank(self, epoch: int, rank: int) -> RankEnds:
        ends = RankEnds(self.socket_name(NODE_OF_RANK[rank]), epoch, rank)
        self.stack.callback(ends.close)
        return ends

    def until(self, happened: Callable[[], object]) -> None:
        """Drive the hub until something has happened."""
        deadline = time.monotonic() + SOON_S
        while not happened():
            assert time.monotonic() < deadline, "it has not happened"
            self.hub.poll(0.01)


@contextmanager
def world(nodes: int = 2, *, stall_s: float = 3.0) -> Iterator[World]:
    """`nodes` relays, each in a thread, attached to a hub."""
    with ExitStack() as stack:
        listener = stack.enter_context(listening())
        host, port = listener.getsockname()
        hub = RelayHub(stall_s=stall_s)
        made = World(hub, (host, port), stack)
        threads = []
        for node in range(nodes):
            thread = threading.Thread(target=_relay, args=(made, node))
            thread.start()
            threads.append(thread)
            line, role = accept_line(listener.accept()[0], secret=SECRET, timeout_s=SOON_S)
            assert role == "relay"
            hub.attach(read_hello(line, SOON_S).node_rank, line)
        try:
            yield made
        finally:
            stack.close()
            hub.close()
            for thread in threads:
                thread.join(SOON_S)
            assert not any(thread.is_alive() for thread in threads)


def _relay(made: World, node: int) -> None:
    grants = GrantServer(made.socket_name(node))
    line = connect_line(*made.address, secret=SECRET, role="relay", timeout_s=SOON_S)
    relay = Relay(line, grants, node, host="test")
    try:
        relay.serve()
    except LineError as error:
        made.ends.append(f"{type(error).__name__}: {error}")
    finally:
        relay.close()
        grants.close()


def closed_by_peer(line: FrameLine) -> bool:
    """Whether the other side has closed the line; what came before is dropped."""
    try:
        line.receive()
    except LineError:
        return True
    return False
