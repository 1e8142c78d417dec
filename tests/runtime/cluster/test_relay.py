"""Through relays: plans reach every rank, results and signs of life come back, and each epoch has its own."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator

import pytest

from runtime.cluster.grants import Grant, GrantRefused, GrantServer, fetch_grant
from runtime.cluster.line import FrameStale, LineTimeout
from runtime.cluster.relay_hub import RelayLost
from runtime.cluster.relay_messages import EpochMemory, GroupSegment
from runtime.ring import (
    MessageTooLarge,
    ReaderDead,
    ReaderLagging,
    RingClosed,
    RingDamaged,
    RingError,
    RingTimeout,
)
from runtime.ring_layout import DATA
from tests.runtime.cluster.line_pair import SOON_S
from tests.runtime.cluster.relay_world import NODE_OF_RANK, PLAN_BYTES, RESULT_BYTES, World, memory, world

NUM_RANKS = len(NODE_OF_RANK)


@pytest.fixture
def two() -> Iterator[World]:
    with world(2) as made:
        yield made


def test_plans_reach_all_ranks_and_results_come_back_in_order(two: World) -> None:
    rng = random.Random(1)
    ports = two.hub.open_epoch(memory(1))
    two.hub.wait_open(SOON_S)
    ranks = [two.rank(1, rank) for rank in range(NUM_RANKS)]
    for step in range(40):
        plan = rng.randbytes(rng.choice([1, 100, PLAN_BYTES]))
        ports.plans.send(plan, SOON_S)
        for number, rank in enumerate(ranks):
            assert rank.plans.receive(SOON_S) == plan
            rank.results.send(bytes([number, step]) * rng.randrange(1, RESULT_BYTES // 2), SOON_S)
        for number, inbox in enumerate(ports.results):
            result = inbox.receive(SOON_S)
            assert result is not None
            assert set(result[::2]) == {number}
            assert set(result[1::2]) == {step}
    assert [inbox.try_receive() for inbox in ports.results] == [None] * NUM_RANKS
    assert two.hub.fault() is None


def test_messages_before_the_ranks_are_there_are_kept(two: World) -> None:
    ports = two.hub.open_epoch(memory(1))
    ports.plans.send(b"early", 0.0)
    two.hub.wait_open(SOON_S)
    ranks = [two.rank(1, rank) for rank in range(NUM_RANKS)]
    assert [rank.plans.receive(SOON_S) for rank in ranks] == [b"early"] * NUM_RANKS
    assert ports.results[0].receive(0.01) is None


def test_signs_of_life_cross_hosts(two: World) -> None:
    ports = two.hub.open_epoch(memory(1))
    two.hub.wait_open(SOON_S)
    ranks = [two.rank(1, rank) for rank in range(NUM_RANKS)]
    for number, rank in enumerate(ranks):
        rank.vitals.step(10 + number)
        rank.vitals.phase(f"phase of {number}")
    two.until(lambda: [vital.step_id for vital in ports.vitals.read()] == [10, 11, 12, 13])
    two.until(lambda: ports.vitals.read()[3].phase == "phase of 3")
    assert [vital.pid for vital in ports.vitals.read()] == [os.getpid()] * NUM_RANKS
    before = [vital.heartbeat_ns for vital in ports.vitals.read()]
    ranks[2].vitals.beat()
    two.until(lambda: [vital.heartbeat_ns for vital in ports.vitals.read()] != before)
    assert [vital.heartbeat_ns != was for vital, was in zip(ports.vitals.read(), before, strict=True)] == [
        False, False, True, False,
    ]


def test_a_new_epoch_has_its_own_memory_and_the_old_one_is_over(two: World) -> None:
    old = two.hub.open_epoch(memory(1))
    two.hub.wait_open(SOON_S)
    left = two.rank(1, 1)
    old.plans.send(b"never read", SOON_S)
    two.until(lambda: left.plans.sequence == 0 and left.plans.try_receive() == b"never read")
    left.results.send(b"in time", SOON_S)
    two.until(lambda: old.results[1].try_receive() == b"in time")
    new = two.hub.open_epoch(memory(2))
    with contextlib.suppress(RingError):
        left.results.send(b"late", SOON_S)  # the relay may have let go of it already
    two.hub.wait_open(SOON_S)
    with pytest.raises(RingClosed):
        left.plans.receive(SOON_S)
    with pytest.raises(RingClosed, match="epoch 1 is over"):
        old.plans.send(b"", 0.0)
    ranks = [two.rank(2, rank) for rank in range(NUM_RANKS)]
    new.plans.send(b"of epoch 2", SOON_S)
    assert [rank.plans.receive(SOON_S) for rank in ranks] == [b"of epoch 2"] * NUM_RANKS
    ranks[1].results.send(b"of epoch 2", SOON_S)
    assert new.results[1].receive(SOON_S) == b"of epoch 2"
    assert old.results[1].receive(0.01) is None
    old.plans.close()  # changes nothing for the new one
    new.plans.send(b"and on", SOON_S)
    assert ranks[3].plans.receive(SOON_S) == b"and on"


def test_closing_the_plans_ends_the_epoch_for_ranks(two: World) -> None:
    ports = two.hub.open_epoch(memory(1))
    two.hub.wait_open(SOON_S)
    rank = two.rank(1, 3)
    for port in (ports.plans, ports.plans):
        port.close()
    with pytest.raises(RingClosed, match="the writer has closed"):
        rank.plans.receive(SOON_S)
    with pytest.raises(FrameStale, match="epoch 1 of rank 3 is over: the relay is at epoch 1"):
        fetch_grant(two.socket_name(1), epoch=1, rank=3, timeout_s=SOON_S)
    ports.vitals.close()
    ports.results[0].close()


def test_grants_are_fenced_by_epoch(two: World) -> None:
    two.hub.open_epoch(memory(4))
    two.hub.wait_open(SOON_S)
    with pytest.raises(FrameStale, match="epoch 3 of rank 1 is over: the relay is at epoch 4"):
        fetch_grant(two.socket_name(1), epoch=3, rank=1, timeout_s=SOON_S)
    with pytest.raises(GrantRefused, match=r"rank 0 is not on this node, in epoch 4 it has \[1, 3\]"):
        fetch_grant(two.socket_name(1), epoch=4, rank=0, timeout_s=SOON_S)
    with pytest.raises(LineTimeout, match="has not granted the memory of rank 1 in epoch 5"):
        fetch_grant(two.socket_name(1), epoch=5, rank=1, timeout_s=0.1)


def test_a_keeper_that_is_early_waits_for_the_epoch(two: World) -> None:
    found: list[Grant] = []
    threads = [
        threading.Thread(
            target=lambda rank=rank: found.append(
                fetch_grant(two.socket_name(NODE_OF_RANK[rank]), epoch=7, rank=rank, timeout_s=SOON_S)
            )
        )
        for rank in range(NUM_RANKS)
    ]
    for thread in threads:
        thread.start()
    two.hub.open_epoch(memory(7))
    two.hub.wait_open(SOON_S)
    for thread in threads:
        thread.join()
    assert sorted((grant.reader_index, grant.vitals_index, grant.epoch) for grant in found) == [
        (0, 0, 7), (0, 0, 7), (1, 1, 7), (1, 1, 7),
    ]
    assert not any(os.get_inheritable(fd) for grant in found for fd in grant.fds)
    for grant in found:
        grant.close()


def test_segments_are_granted_by_group_name(two: World) -> None:
    two.hub.open_epoch(EpochMemory(
        epoch=1, node_of_rank=NODE_OF_RANK, plan_bytes=100, result_bytes=100, slot_bytes=512,
        segments=[GroupSegment(name="ep", ranks=[1, 3], num_bytes=1000)],
    ))
    two.hub.wait_open(SOON_S)
    grants = [fetch_grant(two.socket_name(NODE_OF_RANK[r]), epoch=1, rank=r, timeout_s=SOON_S) for r in range(4)]
    assert [sorted(grant.segments) for grant in grants] == [[], ["ep"], [], ["ep"]]
    os.pwrite(grants[1].segments["ep"], b"here", 10)
    assert os.pread(grants[3].segments["ep"], 6, 9) == b"\0here\0"
    assert {grant.slot_bytes for grant in grants} == {512}
    for grant in grants:
        grant.close()


def test_no_relay_is_there() -> None:
    with pytest.raises(LineTimeout, match="relay 'lockstep-test-nobody' has not granted .*rank 2 .* 1: .*refused"):
        fetch_grant("\0lockstep-test-nobody", epoch=1, rank=2, timeout_s=0.12)


def test_two_relays_cannot_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.cluster.grants.BIND_S", 0.1)
    first = GrantServer("\0lockstep-test-name")
    with pytest.raises(LineTimeout, match="another relay holds"):
        GrantServer("\0lockstep-test-name")
    first.close()
    GrantServer("\0lockstep-test-name").close()


def test_a_slow_rank_holds_up_nobody_else(two: World) -> None:
    """What does not fit into its ring waits at its relay, in order; the other node goes on."""
    ports = two.hub.open_epoch(memory(1))
    two.hub.wait_open(SOON_S)
    ranks = [two.rank(1, rank) for rank in range(NUM_RANKS)]
    plans = [bytes([number]) * 9_000 for number in range(6)]
    for plan in plans:
        ports.plans.send(plan, SOON_S)
    for plan in plans:
        assert ranks[0].plans.receive(SOON_S) == plan
        assert ranks[2].plans.receive(SOON_S) == plan
    ranks[1].results.send(b"alive", SOON_S)
    assert ports.results[1].receive(SOON_S) == b"alive"
    for plan in plans:
        assert ranks[3].plans.receive(SOON_S) == plan
        assert ranks[1].plans.receive(SOON_S) == plan


def test_a_rank_that_never_reads_is_named(two: World) -> None:
    ports = two.hub.open_epoch(memory(1))
    two.hub.wait_open(SOON_S)
    ranks = [two.rank(1, rank) for rank in range(NUM_RANKS)]

    def send_on() -> None:
        for _ in range(1000):
            ports.plans.send(bytes(PLAN_BYTES), SOON_S)
            for rank in ranks[:3]:
                with contextlib.suppress(RingTimeout):
                    rank.plans.receive(0.05)
            two.hub.poll()

    with pytest.raises(ReaderLagging, match=r"node 1: ring 'plans': .*\(rank 3\) is \d+ bytes behind"):
        send_on()
    ranks[3].results.send(b"but it can still tell why", SOON_S)
    assert ports.results[3].receive(SOON_S) == b"but it can still tell why"


def test_results_wait_while_the_controller_is_away(two: World) -> None:
    """40 MB: more than sockets and queue take. Ranks are held up, nothing is lost, and the relay lives."""
    ports = two.hub.open_epoch(EpochMemory(epoch=1, node_of_rank=NODE_OF_RANK, plan_bytes=100, result_bytes=1 << 20))
    two.hub.wait_open(SOON_S)
    rank = two.rank(1, 3)
    results = [bytes([number]) * (1 << 20) for number in range(40)]

    def send() -> None:
        for result in results:
            while True:
                with contextlib.suppress(ReaderLagging):
                    rank.results.send(result, 0.1)
                    break

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert [ports.results[3].receive(SOON_S) for _ in results] == results
    thread.join()
    assert two.hub.fault() is None
    two.until(lambda: ports.vitals.read()[3].pid)


def test_a_rank_that_left_is_named(two: World) -> None:
    ports = two.hub.open_epoch(memory(1))
    two.hub.wait_open(SOON_S)
    ranks = [two.rank(1, rank) for rank in range(NUM_RANKS)]
    ranks[2].results.send(b"last words", SOON_S)
    ranks[2].plans.close()

    def send_on() -> None:
        while True:
            ports.plans.send(b"plan", SOON_S)
            two.hub.poll(0.05)

    with pytest.raises(RingClosed, match=r"node 0: ring 'plans': reader 1 \(rank 2\) has closed its end"):
        send_on()
    assert ports.results[2].receive(SOON_S) == b"last words"
    assert two.hub.fault() is None  # the relay is well


def test_a_damaged_result_ring_is_its_ranks_fault(two: World) -> None:
    ports = two.hub.open_epoch(memory(1))
    two.hub.wait_open(SOON_S)
    grant = fetch_grant(two.socket_name(1), epoch=1, rank=3, timeout_s=SOON_S)
    rank = two.rank(1, 3)

    def damage() -> None:
        while True:
            os.pwrite(grant.results_fd, b"\xff" * RESULT_BYTES, DATA)
            rank.results.send(b"x" * 40, SOON_S)
            os.pwrite(grant.results_fd, b"\xff" * RESULT_BYTES, DATA)
            ports.results[3].receive(0.05)

    with pytest.raises(RingDamaged, match="node 1: ring 'results of rank 3'"):
        damage()
    grant.close()
    assert two.hub.fault() is None


def test_a_message_that_is_too_large(two: World) -> None:
    ports = two.hub.open_epoch(memory(1))
    with pytest.raises(MessageTooLarge, match=f"{PLAN_BYTES + 1} bytes, expected at most {PLAN_BYTES}"):
        ports.plans.send(bytes(PLAN_BYTES + 1), 0.0)
    two.hub.wait_open(SOON_S)


def test_memory_that_is_not_to_be_had(two: World) -> None:
    two.hub.open_epoch(EpochMemory(epoch=1, node_of_rank=[0, 1], plan_bytes=1 << 40, result_bytes=10))
    with pytest.raises(RelayLost, match="relay of node [01]: no memory for the epoch: capacity of ring 'plans'"):
        two.hub.wait_open(SOON_S)


def test_the_line_ends_the_relay_and_its_epoch(two: World) -> None:
    ports = two.hub.open_epoch(memory(1))
    two.hub.wait_open(SOON_S)
    ranks = [two.rank(1, rank) for rank in range(NUM_RANKS)]
    two.hub.detach(1)
    for rank in (1, 3):
        with pytest.raises(RingClosed):
            ranks[rank].plans.receive(SOON_S)
    two.until(lambda: two.ends)
    assert two.ends[0].startswith("LineClosed: controller at 127.0.0.1:")
    with pytest.raises(ReaderDead, match="relay of node 1 is gone"):
        ports.plans.send(b"", 0.0)
    with pytest.raises(RelayLost, match="relay of node 1: not connected"):
        two.hub.open_epoch(memory(2))
