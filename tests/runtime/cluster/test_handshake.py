"""Only who knows the secret and speaks this version gets a line, and each refusal has its own name."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cluster import handshake
from runtime.cluster.handshake import accept_handshake, offer_handshake
from runtime.cluster.line import AuthenticationFailed, LineClosed, LineError, LineTimeout, VersionRefused, accept_line
from tests.runtime.cluster.line_pair import SECRET, SOON_S, line_pair

ANSWER_BYTES = 4 + handshake.TEXT_BYTES


def deadline(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


@contextmanager
def accepting(secret: bytes = SECRET, seconds: float = SOON_S) -> Iterator[tuple[socket.socket, Future[str]]]:
    """(the connecting end, what becomes of the accepting one)."""
    ours, theirs = socket.socketpair()
    with theirs, ThreadPoolExecutor(1) as pool:
        def accept() -> str:
            with ours:  # a refused connection is closed
                return accept_handshake(ours, secret, "10.0.0.9:1", deadline(seconds))

        theirs.settimeout(SOON_S)
        yield theirs, pool.submit(accept)


@pytest.mark.parametrize("role", ["relay", "keeper", "a-role-of-16-let"])
def test_both_sides_know_the_secret(role: str) -> None:
    with accepting() as (sock, accepted):
        offer_handshake(sock, SECRET, role, "controller", deadline())
        assert accepted.result() == role


def test_an_empty_secret_is_a_secret() -> None:
    with accepting(b"") as (sock, accepted):
        offer_handshake(sock, b"", "relay", "controller", deadline())
        assert accepted.result() == "relay"


@pytest.mark.parametrize("wrong", [b"", b"another secret", SECRET + b"\0"])
def test_a_wrong_secret_fails_on_both_sides(wrong: bytes) -> None:
    with accepting() as (sock, accepted):
        with pytest.raises(AuthenticationFailed, match="controller does not know our secret.*LOCKSTEP_SECRET"):
            offer_handshake(sock, wrong, "relay", "controller", deadline())
        with pytest.raises(AuthenticationFailed, match="relay at 10.0.0.9:1 refuses: .*another secret"):
            accepted.result()


def hello(version: int = handshake.PROTOCOL_VERSION, greeting: bytes = handshake.GREETING) -> bytes:
    return struct.pack("<8sI16s32s", greeting, version, b"relay", bytes(32))


def test_a_client_without_the_secret_cannot_send_the_servers_proof_back() -> None:
    with accepting() as (sock, accepted):
        sock.sendall(hello())
        answer = sock.recv(ANSWER_BYTES, socket.MSG_WAITALL)
        proof = answer[4 + 32 : 4 + 64]
        sock.sendall(struct.pack("<4s128s", b"PROF", proof))
        assert sock.recv(ANSWER_BYTES, socket.MSG_WAITALL)[:4] == b"REFU"
        with pytest.raises(AuthenticationFailed, match="relay at 10.0.0.9:1 does not know our secret"):
            accepted.result()


def test_a_proof_of_another_connection_is_worth_nothing() -> None:
    """Nonces of the server differ, so what a listener on the wire has recorded does not open the door."""
    answers = []
    for _ in range(2):
        with accepting() as (sock, accepted):
            sock.sendall(hello())
            answers.append(sock.recv(ANSWER_BYTES, socket.MSG_WAITALL))
            nonce = answers[0][4:36]
            recorded = hmac.new(hashlib.sha256(SECRET).digest(), b"client" + hello() + nonce, hashlib.sha256).digest()
            sock.sendall(struct.pack("<4s128s", b"PROF", recorded))
            if len(answers) == 1:
                assert accepted.result() == "relay"
    assert answers[0] != answers[1]
    with pytest.raises(AuthenticationFailed):
        accepted.result()


def test_another_version_is_refused_by_name_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    with accepting() as (sock, accepted):
        sock.sendall(hello(version=7))
        with pytest.raises(VersionRefused, match="10.0.0.9:1 speaks protocol version 7, expected 1"):
            accepted.result()
        refusal = sock.recv(ANSWER_BYTES, socket.MSG_WAITALL)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(refusal)
        with pytest.raises(VersionRefused, match="controller speaks protocol version 1, this process 7"):
            offer_handshake(ours, SECRET, "relay", "controller", deadline())


def test_who_does_not_greet_is_no_part_of_lockstep() -> None:
    with accepting() as (sock, accepted):
        sock.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n".ljust(80))
        with pytest.raises(AuthenticationFailed, match="no part of Lockstep: it begins with b'GET / HT'"):
            accepted.result()


def test_a_server_of_something_else() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n".ljust(ANSWER_BYTES))
        with pytest.raises(AuthenticationFailed, match="no part of Lockstep"):
            offer_handshake(ours, SECRET, "relay", "controller", deadline())


@pytest.mark.parametrize("sent", [b"", hello()[:10], hello()])
def test_who_says_nothing_more_is_given_up_in_time(sent: bytes) -> None:
    with accepting(seconds=0.1) as (sock, accepted):
        sock.sendall(sent)
        with pytest.raises(LineTimeout, match="in time"):
            accepted.result()


@pytest.mark.parametrize("sent", [b"", hello()[:10], hello()])
def test_who_leaves_is_named(sent: bytes) -> None:
    with accepting() as (sock, accepted):
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(LineClosed, match="10.0.0.9:1 has closed the connection during the handshake"):
            accepted.result()


@pytest.mark.parametrize("role", ["", "Relay", "with space", "a-role-of-17-lette"])
def test_roles_are_plain_words(role: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match="role"):
        offer_handshake(ours, SECRET, role, "controller", deadline())


def test_a_refused_connection_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(hello(greeting=b"WHATEVER"))
        with pytest.raises(AuthenticationFailed):
            accept_line(ours, secret=SECRET, timeout_s=SOON_S)
        assert ours.fileno() == -1


def test_what_follows_the_handshake_at_once_is_not_lost() -> None:
    with line_pair() as (accepted, connected):
        connected.send(1, 0, b"hello")
        assert [frame.body for frame in accepted.wait(SOON_S)] == [b"hello"]


@settings(max_examples=60, deadline=None)
@given(data=st.binary(min_size=0, max_size=250))
def test_noise_never_opens_a_line(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(LineError):
            accept_handshake(ours, SECRET, "noise", deadline())
