"""Ranks meet: epochs, secrets, strangers, ranks that come early, late, twice or never; nothing stays open after it."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
import torch

from parallel import socket_greeting
from parallel.abort import Aborted
from parallel.exchange_errors import ExchangeRefused
from parallel.layout import Layout, RankGroups
from parallel.socket_greeting import ANSWER_BYTES, HELLO_BYTES, Self, hello
from parallel.socket_group import ExchangeListener, close_groups
from tests.parallel.hosts import SECRET, Hosts, hosts

TWO, THREE = Layout(dp=2), Layout(dp=3)


def sum_over(groups: RankGroups) -> float:
    return float(groups.ep.all_gather(torch.ones(1)).wait().sum())


def use(groups: RankGroups) -> float:
    try:
        return sum_over(groups)
    finally:
        close_groups(groups)


def meet_and_use(made: Hosts, rank: int, epoch: int) -> float:
    return use(made.groups(rank, epoch=epoch))


def attempt(work: Callable[[], RankGroups]) -> str:
    """What `work` says when it fails."""
    try:
        close_groups(work())
    except Exception as error:  # noqa: BLE001  (whatever it is, the test looks at it)
        return f"{type(error).__name__}: {error}"
    return "met"


def sockets_open() -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return sum(link.startswith(("socket:", "anon_inode:[eventfd]")) for link in links)


def test_one_epoch_after_the_other() -> None:
    with hosts(THREE, (0, 1, 1)) as made:
        before = sockets_open()
        for epoch in range(1, 6):
            made.new_segments(1 << 12)
            assert made.run(lambda _, groups: sum_over(groups), epoch=epoch, slot_bytes=1 << 12) == [3.0] * 3
        assert sockets_open() == before


def test_a_rank_behind_is_told_its_epoch_is_over() -> None:
    with hosts(TWO, (0, 1)) as made, ThreadPoolExecutor(2) as pool:
        ahead = pool.submit(lambda: use(made.groups(0, epoch=7)))
        assert attempt(lambda: made.groups(1, epoch=6)) == (
            f"StaleEpoch: rank 0 at 127.0.0.1:{made.listeners[0].port} is in epoch 7, rank 1 in 6"
        )
        assert not ahead.done()
        assert use(made.groups(1, epoch=7)) == 2.0  # rank 0 has waited for those of its own epoch
        assert ahead.result(10) == 2.0


def test_a_rank_ahead_waits_for_the_others() -> None:
    """Rank 0 is still forming epoch 1 without rank 2 when rank 1 calls for epoch 2; it is called off, and follows."""
    with hosts(THREE, (0, 1, 2)) as made, ThreadPoolExecutor(3) as pool:
        behind = pool.submit(attempt, lambda: made.groups(0, epoch=1))
        ahead = [pool.submit(meet_and_use, made, rank, epoch=2) for rank in (1, 2)]
        deadline = time.monotonic() + 10
        while len(made.listeners[0].early) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        made.aborts[0].set()
        assert behind.result(10).startswith("Aborted")
        made.aborts[0].clear()
        assert use(made.groups(0, epoch=2)) == 3.0
        assert [each.result(10) for each in ahead] == [3.0, 3.0]
        assert not made.listeners[0].early


def test_those_who_came_early_for_an_epoch_that_never_was_are_forgotten() -> None:
    with hosts(TWO, (0, 1)) as made, ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(attempt, lambda: made.groups(0, epoch=1))
        early = pool.submit(attempt, lambda: made.groups(1, epoch=2))
        while not made.listeners[0].early:
            time.sleep(0.01)
        made.aborts[0].set()
        waiting.result(10)
        made.aborts[0].clear()
        latest = pool.submit(lambda: use(made.groups(0, epoch=3)))
        assert early.result(10).startswith("StaleEpoch")
        assert use(made.groups(1, epoch=3)) == 2.0
        assert latest.result(10) == 2.0


def test_a_wrong_secret_is_refused_and_named() -> None:
    with hosts(TWO, (0, 1)) as made, ThreadPoolExecutor(1) as pool:
        listening = pool.submit(attempt, lambda: made.groups(0, timeout_s=1.0))
        assert attempt(lambda: made.groups(1, secret=b"wrong")) == (
            f"ExchangeRefused: rank 0 at 127.0.0.1:{made.listeners[0].port} does not have the secret of rank 1"
        )
        # An impostor cannot end the others' meeting: they go on waiting for the real one.
        assert listening.result(10).startswith("PeersMissing: rank 0, epoch 1: ranks [1] did not come within 1 s")


def test_a_caller_without_the_secret_is_not_met_and_takes_nobodys_place() -> None:
    """It plays its part up to the proof, which it cannot give; the real rank then comes."""
    with hosts(TWO, (0, 1)) as made, ThreadPoolExecutor(1) as pool:
        listening = pool.submit(lambda: use(made.groups(0)))
        with call(made.listeners[0]) as impostor:
            impostor.sendall(hello(Self(rank=1, epoch=1, secret=b""), "ep"))
            assert len(impostor.recv(ANSWER_BYTES)) == ANSWER_BYTES
            impostor.sendall(bytes(32))
            assert impostor.recv(1) == b""
        assert use(made.groups(1)) == 2.0
        assert listening.result(10) == 2.0


def test_what_was_recorded_cannot_be_played_again() -> None:
    """The proof of one meeting is no proof in the next: both ends' nonces are in it."""
    said = hello(me := Self(rank=1, epoch=1, secret=SECRET), "ep")
    other = Self(rank=0, epoch=1, secret=SECRET)
    answers, proofs = zip(*(socket_greeting.welcome(other, said) for _ in range(2)), strict=True)
    given = [socket_greeting.reply_to_answer(me, said, answer, 0, "there") for answer in answers]
    assert given == list(proofs)
    assert given[0] != given[1]
    with pytest.raises(ExchangeRefused, match="does not have the secret"):
        socket_greeting.reply_to_answer(me, hello(me, "ep"), answers[0], 0, "there")


def test_strangers_are_sent_away_or_ignored() -> None:
    with hosts(TWO, (0, 1)) as made, ThreadPoolExecutor(1) as pool:
        listening = pool.submit(lambda: use(made.groups(0)))
        with call(made.listeners[0]) as silent, call(made.listeners[0]) as browser, call(made.listeners[0]) as brief:
            browser.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n".ljust(HELLO_BYTES))
            assert browser.recv(1) == b""
            brief.close()
            assert use(made.groups(1)) == 2.0
            assert listening.result(10) == 2.0
            assert silent.recv(1) == b""


@pytest.mark.parametrize(("rank", "group"), [(7, "ep"), (0, "ep"), (1, "tp"), (1, "another")])
def test_ranks_that_are_not_expected_are_refused(rank: int, group: str) -> None:
    with hosts(TWO, (0, 1)) as made, ThreadPoolExecutor(1) as pool:
        listening = pool.submit(attempt, lambda: made.groups(0, timeout_s=0.5))
        with call(made.listeners[0]) as sock:
            me = Self(rank=rank, epoch=1, secret=SECRET)
            said = hello(me, group)
            sock.sendall(said)
            answer = sock.recv(ANSWER_BYTES)
        with pytest.raises(ExchangeRefused, match="does not expect"):
            socket_greeting.reply_to_answer(me, said, answer, 0, "there")
        assert f"refused: rank {rank} of epoch 1" in listening.result(10)


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = hello(me := Self(rank=1, epoch=1, secret=SECRET), "ep")
    monkeypatch.setattr(socket_greeting, "VERSION", 2)
    caller = socket_greeting.read_hello(said)
    assert caller is not None
    answer = socket_greeting.refusal(Self(rank=0, epoch=1, secret=SECRET), caller, expected=True)
    assert answer is not None
    monkeypatch.setattr(socket_greeting, "VERSION", 1)
    with pytest.raises(ExchangeRefused, match="rank 0 at there: protocol version 2, rank 1 has 1"):
        socket_greeting.reply_to_answer(me, said, answer, 0, "there")


def test_the_same_rank_twice_is_met_once() -> None:
    with hosts(TWO, (0, 1)) as made, ThreadPoolExecutor(2) as pool:
        done = threading.Event()

        def stay(rank: int) -> float:
            groups = made.groups(rank)
            total = sum_over(groups)
            assert done.wait(10)
            close_groups(groups)
            return total

        both = [pool.submit(stay, rank) for rank in (0, 1)]
        time.sleep(0.2)
        # Nobody accepts outside a meeting: the second one is not answered.
        assert attempt(lambda: made.groups(1, timeout_s=0.5)).startswith("PeersMissing: rank 1, epoch 1: ranks [0]")
        done.set()
        assert [each.result(10) for each in both] == [2.0, 2.0]


def test_ranks_that_stay_away_are_named() -> None:
    with hosts(Layout(dp=4), (0, 1, 2, 3)) as made, ThreadPoolExecutor(2) as pool:
        found: list[Future[str]] = [
            pool.submit(attempt, partial(made.groups, rank, timeout_s=0.5)) for rank in (0, 2)
        ]
        messages = [each.result(10) for each in found]
    assert messages[0] == "PeersMissing: rank 0, epoch 1: ranks [1, 3] did not come within 0.5 s"
    assert messages[1] == "PeersMissing: rank 2, epoch 1: ranks [1, 3] did not come within 0.5 s"


def test_a_rank_nobody_listens_for_is_lost() -> None:
    with hosts(TWO, (0, 1)) as made:
        port = made.listeners[0].port
        made.listeners[0].close()
        message = attempt(lambda: made.groups(1, addresses=[("127.0.0.1", port), ("127.0.0.1", 1)]))
        nowhere = attempt(lambda: made.groups(1, addresses=[("no such host", port), ("127.0.0.1", 1)]))
    assert message == f"PeerLost: rank 0 cannot be reached at 127.0.0.1:{port}: Connection refused"
    assert nowhere.startswith(f"PeerLost: rank 0 cannot be reached at no such host:{port}: ")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_is_called_off(rank: int) -> None:
    with hosts(TWO, (0, 1)) as made, ThreadPoolExecutor(1) as pool:
        before = sockets_open()
        meeting = pool.submit(made.groups, rank)
        time.sleep(0.1)
        assert not meeting.done()
        made.aborts[rank].set()
        with pytest.raises(Aborted):
            meeting.result(5)
        assert sockets_open() == before


def test_a_rank_that_dies_while_it_is_met_is_lost() -> None:
    with hosts(TWO, (0, 1)) as made, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(attempt, lambda: made.groups(1))
        while (sock := made.listeners[0].accept()) is None:
            time.sleep(0.01)
        sock.close()
        assert calling.result(10).startswith("PeerLost: rank 0 at 127.0.0.1:")


def test_a_rank_that_resets_the_connection_is_lost() -> None:
    """At any point of the greeting: no error but ours may come out, since others end the process."""
    with hosts(TWO, (0, 1)) as made, ThreadPoolExecutor(1) as pool:
        for heard in (0, HELLO_BYTES):
            calling = pool.submit(attempt, lambda: made.groups(1))
            while (sock := made.listeners[0].accept()) is None:
                time.sleep(0.01)
            sock.settimeout(10)
            if heard:
                sock.recv(heard, socket.MSG_WAITALL)
                sock.send(bytes(10))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            assert calling.result(10).startswith("PeerLost: rank 0 at 127.0.0.1:")


def call(listener: ExchangeListener) -> socket.socket:
    sock = socket.create_connection((listener.host, listener.port))
    sock.settimeout(10)
    return sock

