"""Descriptors arrive as the receiver's own, not inherited, and none is lost or left open when something is wrong."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from runtime.cluster.fd_passing import (
    MAX_FDS,
    MAX_MESSAGE_BYTES,
    close_all,
    peer_uid,
    receive_message,
    send_message,
)
from runtime.cluster.line import FrameDamaged, FrameTooLarge, LineClosed

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test-memory", os.MFD_CLOEXEC)
    os.write(fd, b"shared")
    yield fd
    os.close(fd)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_messages_keep_their_edges_and_descriptors(pair: Pair, memory: int) -> None:
    send_message(pair[0], b"one", [memory, memory])
    send_message(pair[0], b"two")
    data, fds = receive_message(pair[1])
    assert data == b"one"
    assert [os.pread(fd, 6, 0) for fd in fds] == [b"shared", b"shared"]
    assert memory not in fds
    assert not any(os.get_inheritable(fd) for fd in fds)
    close_all(fds)
    assert receive_message(pair[1]) == (b"two", [])
    with pytest.raises(BlockingIOError):
        receive_message(pair[1])


def test_as_many_as_allowed(pair: Pair, memory: int) -> None:
    before = open_fds()
    send_message(pair[0], bytes(MAX_MESSAGE_BYTES), [memory] * MAX_FDS)
    data, fds = receive_message(pair[1])
    assert (len(data), len(fds)) == (MAX_MESSAGE_BYTES, MAX_FDS)
    close_all(fds)
    assert open_fds() == before


@pytest.mark.parametrize(
    ("data", "num_fds", "text"),
    [
        (b"", 0, "message of 0 bytes"),
        (bytes(MAX_MESSAGE_BYTES + 1), 0, "expected 1..131072"),
        (b"x", MAX_FDS + 1, "65 descriptors in one message, expected at most 64"),
    ],
)
def test_too_much_is_not_sent(pair: Pair, memory: int, data: bytes, num_fds: int, text: str) -> None:
    with pytest.raises(FrameTooLarge, match=text):
        send_message(pair[0], data, [memory] * num_fds)
    with pytest.raises(BlockingIOError):
        receive_message(pair[1])


@pytest.mark.parametrize(("data", "num_fds"), [(b"x", MAX_FDS + 9), (bytes(MAX_MESSAGE_BYTES + 1), 1)])
def test_what_was_cut_off_is_refused_and_nothing_stays_open(pair: Pair, memory: int, data: bytes, num_fds: int) -> None:
    before = open_fds()
    socket.send_fds(pair[0], [data], [memory] * num_fds)
    with pytest.raises(FrameDamaged, match="cut off"):
        receive_message(pair[1])
    assert open_fds() == before


def test_the_end(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(LineClosed, match="has closed the local socket"):
        receive_message(pair[1])
    with pytest.raises(LineClosed, match="broken"):
        send_message(pair[1], b"x")


def test_the_kernel_tells_the_user(pair: Pair) -> None:
    assert peer_uid(pair[0]) == os.getuid()
