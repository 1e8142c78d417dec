"""The controller's door when more come at once than it talks to at a time."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from runtime.cluster.acceptor import Acceptor, Arrival
from runtime.cluster.keeper_messages import KEEPER_FRAME, Hello, decode_hello, encode
from runtime.cluster.line import FrameLine, connect_line
from tests.runtime.cluster.line_pair import SECRET, SOON_S


def hello(rank: int) -> bytes:
    return encode(Hello(
        rank=rank, world_size=3, local_rank=0, local_world_size=1, node_rank=rank, num_nodes=3, source="manual",
        host="test", pid=1, facts={},
    ))


def come(acceptor: Acceptor) -> FrameLine:
    host, port = acceptor.address
    return connect_line(host, port, secret=SECRET, role="keeper", timeout_s=SOON_S)


def arrivals(acceptor: Acceptor, count: int) -> list[Arrival]:
    found: list[Arrival] = []
    deadline = time.monotonic() + SOON_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} have come"
        found += acceptor.take()
        time.sleep(0.005)
    return found


def test_who_comes_when_all_hands_are_full_waits_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.cluster.acceptor.MAX_AT_ONCE", 1)
    acceptor = Acceptor(socket.create_server(("127.0.0.1", 0)), secret=SECRET, dead_after_s=20.0)

    def greet(rank: int) -> FrameLine:
        line = come(acceptor)
        line.send(KEEPER_FRAME, 0, hello(rank))
        return line

    with ThreadPoolExecutor(2) as pool:
        first = come(acceptor)  # and looks at the files of its model for a while
        others = [pool.submit(greet, rank) for rank in (1, 2)]
        assert acceptor.take() == []
        first.send(KEEPER_FRAME, 0, hello(0))
        here = arrivals(acceptor, 3)
        lines = [first, *(other.result() for other in others)]
    assert [arrival.hello for arrival in here][0] == decode_hello(hello(0))
    assert acceptor.refusals == []
    acceptor.close()
    for line in [*lines, *(arrival.line for arrival in here)]:
        line.close()


def test_closing_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.cluster.acceptor.MAX_AT_ONCE", 1)
    acceptor = Acceptor(socket.create_server(("127.0.0.1", 0)), secret=SECRET, dead_after_s=20.0)
    first = come(acceptor)
    with socket.create_connection(acceptor.address) as second:
        second.settimeout(SOON_S)
        acceptor.close()
        with suppress(ConnectionResetError):
            assert second.recv(1) == b""
    first.close()
