"""Who else is waited for when a launch is refused, and for how long."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from runtime.cluster.acceptor import Acceptor
from runtime.cluster.bystanders import await_bystanders
from runtime.cluster.keeper_messages import KEEPER_FRAME, Hello, encode
from runtime.cluster.line import FrameLine, connect_line
from tests.runtime.cluster.line_pair import SECRET, SOON_S


@pytest.fixture
def acceptor() -> Iterator[Acceptor]:
    made = Acceptor(socket.create_server(("127.0.0.1", 0)), secret=SECRET, dead_after_s=SOON_S)
    yield made
    made.close()


def hello(rank: int, world_size: int) -> Hello:
    return Hello(
        rank=rank, world_size=world_size, local_rank=0, local_world_size=1, node_rank=rank, num_nodes=world_size,
        source="manual", host="here", pid=1, facts={},
    )


def come(acceptor: Acceptor, rank: int) -> FrameLine:
    line = connect_line(*acceptor.address, secret=SECRET, role="keeper", timeout_s=SOON_S)
    line.send(KEEPER_FRAME, 0, encode(hello(rank, 3)))
    return line


def test_those_who_come_are_waited_for_and_no_others(acceptor: Acceptor) -> None:
    lines = [come(acceptor, rank) for rank in (1, 2)]
    begin = time.monotonic()
    others = await_bystanders(acceptor, 3, num_here=1, timeout_s=60.0)
    assert len(others) == 2
    assert time.monotonic() - begin < 30.0  # not until the time is over
    for line in (*lines, *others):
        line.close()


def test_nobody_is_waited_for_beyond_the_limit(acceptor: Acceptor) -> None:
    assert await_bystanders(acceptor, 3, num_here=1, timeout_s=0.3) == []


def test_a_launch_that_is_complete_waits_for_nobody(acceptor: Acceptor) -> None:
    begin = time.monotonic()
    assert await_bystanders(acceptor, 2, num_here=2, timeout_s=60.0) == []
    assert time.monotonic() - begin < 30.0
