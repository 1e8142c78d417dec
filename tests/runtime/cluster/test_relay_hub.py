"""The hub against relays that misbehave: each fault names the node, and what is old or foreign is not believed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from runtime.cluster.line import Frame, FrameDamaged, FrameLine, LineTimeout
from runtime.cluster.relay_hub import RelayHub, RelayLost, read_hello
from runtime.cluster.relay_messages import (
    EpochMemory,
    OpenEpoch,
    RelayFrame,
    RelayHello,
    Trouble,
    decode,
    encode,
    frame_result,
)
from runtime.ring import ReaderDead, ReaderLagging, RingClosed, RingDamaged
from runtime.vitals import page_size
from tests.runtime.cluster.line_pair import SOON_S, line_pair
from tests.runtime.cluster.relay_world import PLAN_BYTES, RESULT_BYTES, closed_by_peer, memory


@dataclass
class Played:
    """A hub and the far ends of its lines, in node order."""

    hub: RelayHub
    relays: list[FrameLine]

    def open(self, epoch: int) -> None:
        """What well-behaved relays do."""
        for relay in self.relays:
            assert [frame for frame in frames_of(relay) if frame.kind == RelayFrame.OPEN][-1].epoch == epoch
            relay.send(RelayFrame.OPENED, epoch, b"")
        self.hub.wait_open(SOON_S)

    def poll(self) -> None:
        """Until nothing is on its way (loopback)."""
        for _ in range(5):
            self.hub.poll(0.01)


def frames_of(relay: FrameLine) -> list[Frame]:
    frames = relay.wait(SOON_S)
    while more := relay.receive():
        frames += more
    return [frame for frame in frames if frame.kind != RelayFrame.BEAT]


@contextmanager
def played(num_nodes: int, stall_s: float) -> Iterator[Played]:
    with ExitStack() as stack:
        hub = RelayHub(stall_s=stall_s)
        stack.callback(hub.close)
        relays = []
        for node in range(num_nodes):
            ours, theirs = stack.enter_context(line_pair("relay"))
            hub.attach(node, ours)
            relays.append(theirs)
        yield Played(hub, relays)


@pytest.fixture
def two() -> Iterator[Played]:
    with played(2, 3.0) as made:
        yield made


def test_what_relays_are_told(two: Played) -> None:
    two.hub.open_epoch(memory(9))
    for node, relay in enumerate(two.relays):
        (opening,) = frames_of(relay)
        assert (opening.kind, opening.epoch) == (RelayFrame.OPEN, 9)
        assert decode(OpenEpoch, opening.body) == memory(9).of_node(node)


def test_hello() -> None:
    with line_pair("relay") as (ours, theirs):
        theirs.send(RelayFrame.HELLO, 0, encode(RelayHello(node_rank=3, host="n3", pid=77)))
        assert read_hello(ours, SOON_S) == RelayHello(node_rank=3, host="n3", pid=77)
        theirs.send(RelayFrame.BEAT, 0, b"")
        with pytest.raises(FrameDamaged, match="relay at 127.* begins with a frame of kind 24, expected 16"):
            read_hello(ours, SOON_S)
        theirs.send(RelayFrame.HELLO, 0, b"\x80")
        with pytest.raises(FrameDamaged, match="RelayHello"):
            read_hello(ours, SOON_S)


def test_relays_that_do_not_open_are_named(two: Played) -> None:
    two.hub.open_epoch(memory(1))
    two.relays[0].send(RelayFrame.OPENED, 1, b"")
    with pytest.raises(LineTimeout, match=r"relays of nodes \[1\] have not opened epoch 1 in 0.1 s"):
        two.hub.wait_open(0.1)


def test_an_epoch_must_be_new(two: Played) -> None:
    two.hub.open_epoch(memory(5))
    for epoch in (4, 5):
        with pytest.raises(ValueError, match=f"epoch {epoch} is not new: the last was 5"):
            two.hub.open_epoch(memory(epoch))


def test_frames_of_an_older_epoch_are_dropped(two: Played) -> None:
    two.hub.open_epoch(memory(1))
    two.open(1)
    two.relays[0].send(RelayFrame.RESULT, 1, frame_result(0, b"old"))
    ports = two.hub.open_epoch(memory(2))
    two.relays[0].send(RelayFrame.RESULT, 1, frame_result(0, b"old"))
    two.relays[0].send(RelayFrame.VITALS, 1, b"\xff" * page_size(2))
    two.relays[0].send(RelayFrame.TROUBLE, 1, encode(Trouble(rank=-1, error="ReaderDead", text="old")))
    two.relays[1].send(RelayFrame.OPENED, 1, b"")
    two.poll()
    with pytest.raises(LineTimeout, match=r"nodes \[0, 1\]"):
        two.hub.wait_open(0.0)
    two.open(2)
    assert [inbox.try_receive() for inbox in ports.results] == [None] * 4
    assert [vital.pid for vital in ports.vitals.read()] == [0] * 4
    ports.plans.send(b"plan", 0.0)
    two.relays[0].send(RelayFrame.RESULT, 2, frame_result(0, b"new"))
    assert ports.results[0].receive(SOON_S) == b"new"
    assert two.hub.fault() is None


@pytest.mark.parametrize(
    ("kind", "epoch", "body", "text"),
    [
        (RelayFrame.RESULT, 1, frame_result(0, b""), r"speaks for rank 0, its own are \[1, 3\]"),
        (RelayFrame.RESULT, 1, frame_result(99, b""), "speaks for rank 99"),
        (RelayFrame.RESULT, 1, b"abc", "a result of 3 bytes"),
        (RelayFrame.RESULT, 2, frame_result(1, b""), "speaks of epoch 2, the last was 1"),
        (RelayFrame.RESULT, 1, bytes(100_000), "of 100000 bytes, expected at most 65536"),
        (RelayFrame.VITALS, 1, bytes(10), f"vitals of 10 bytes, expected {page_size(2)}"),
        (RelayFrame.TROUBLE, 1, b"\xc1", "Trouble of 1 bytes is damaged"),
        (RelayFrame.TROUBLE, 1, encode(Trouble(rank=2, error="RingDamaged", text="")), "speaks for rank 2"),
        (RelayFrame.TROUBLE, 1, encode(Trouble(rank=-1, error="OSError", text="no memory left")), "no memory left"),
        (999, 1, b"", "frame of kind 999"),
    ],
)
def test_what_a_relay_may_not_say(two: Played, kind: int, epoch: int, body: bytes, text: str) -> None:
    ports = two.hub.open_epoch(memory(1))
    two.open(1)
    two.relays[1].send(kind, epoch, body)
    two.poll()
    fault = two.hub.fault()
    assert fault is not None
    assert fault.node_rank == 1
    assert fault.text.startswith("relay of node 1: ")
    assert re.search(text, fault.text), fault.text
    with pytest.raises(ReaderDead, match="relay of node 1"):
        ports.plans.send(b"", 0.0)
    two.hub.detach(1)
    assert two.hub.fault() is None
    assert closed_by_peer(two.relays[1])


def test_a_closed_line_is_a_fault_and_a_new_relay_takes_part_from_the_next_epoch(two: Played) -> None:
    ports = two.hub.open_epoch(memory(1))
    two.open(1)
    two.relays[0].send(RelayFrame.RESULT, 1, frame_result(2, b"last"))
    two.relays[0].close()
    assert ports.results[2].receive(SOON_S) == b"last"
    two.poll()
    fault = two.hub.fault()
    assert fault is not None
    assert (fault.node_rank, "closed the line" in fault.text) == (0, True)
    with pytest.raises(RelayLost, match="relay of node 0: .* closed the line"):
        two.hub.open_epoch(memory(2))
    with line_pair("relay") as (ours, theirs):
        two.hub.attach(0, ours)
        two.relays[0] = theirs
        with pytest.raises(ReaderDead, match="relay of node 0"):
            ports.plans.send(b"", 0.0)
        two.hub.open_epoch(memory(2))
        two.open(2)
        assert two.hub.fault() is None
        two.hub.close()


def test_a_relay_that_takes_the_place_of_another_unseen_ends_the_epoch(two: Played) -> None:
    two.hub.open_epoch(memory(1))
    two.open(1)
    assert two.hub.gone() == ""
    two.relays[1].close()
    with line_pair("relay") as (ours, _):
        two.hub.attach(1, ours)  # before anybody has looked at the old line
        two.poll()
        assert two.hub.fault() is None
        assert two.hub.gone() == "relay of node 1 is gone"


def test_silence_is_a_fault_of_the_relay_and_not_of_its_ranks() -> None:
    with played(2, 0.6) as two:
        ports = two.hub.open_epoch(memory(1))
        two.open(1)
        page = b"\x01" * page_size(2)
        beats = [vital.heartbeat_ns for vital in ports.vitals.read()]
        deadline = time.monotonic() + SOON_S
        moved: set[int] = set()
        while two.hub.fault() is None:
            assert time.monotonic() < deadline
            two.relays[0].send(RelayFrame.VITALS, 1, page)
            two.hub.poll(0.02)
            if two.hub.is_quiet(1):
                now = [vital.heartbeat_ns for vital in ports.vitals.read()]
                moved |= {rank for rank in range(4) if now[rank] != beats[rank]}
                beats = now
        fault = two.hub.fault()
        assert fault is not None
        assert fault.node_rank == 1
        assert "no sign of life for 0." in fault.text
        assert {1, 3} <= moved  # ranks of the quiet relay seem to beat
        assert not two.hub.is_quiet(0)


def test_silence_while_nobody_looks_does_not_count() -> None:
    with played(1, 0.6) as one:
        one.hub.open_epoch(memory(1, [0, 0, 0, 0]))
        one.open(1)
        time.sleep(0.8)
        one.hub.poll()
        assert one.hub.fault() is None


def test_relays_hear_that_the_hub_looks(two: Played) -> None:
    two.hub.poll()
    assert [frame.kind for frame in two.relays[0].wait(SOON_S)] == [RelayFrame.BEAT]


def test_a_relay_that_takes_nothing_is_named_and_nothing_is_sent_to_the_others() -> None:
    with played(2, 60.0) as two:
        ports = two.hub.open_epoch(EpochMemory(epoch=1, node_of_rank=[0, 1], plan_bytes=1 << 20, result_bytes=100))
        two.open(1)
        num_sent = 0

        def send_on() -> None:
            nonlocal num_sent
            while True:
                ports.plans.send(bytes(1 << 20), 0.02)
                num_sent += 1
                taken[0] += sum(frame.kind == RelayFrame.PLANS for frame in two.relays[0].receive())

        taken = [0, 0]
        two.relays[0].max_frame_bytes = two.relays[1].max_frame_bytes = 1 << 20
        with pytest.raises(ReaderLagging, match=r"plans: relay of node 1 does not take its messages: \d+ bytes wait"):
            send_on()
        deadline = time.monotonic() + SOON_S
        while taken != [num_sent, num_sent]:
            assert time.monotonic() < deadline, (taken, num_sent)
            two.hub.poll(0.01)
            for node, relay in enumerate(two.relays):
                taken[node] += sum(frame.kind == RelayFrame.PLANS for frame in relay.receive())
        ports.plans.send(b"and on", SOON_S)
        assert two.hub.fault() is None


def test_room_is_room_for_the_whole_frame() -> None:
    with played(1, 60.0) as one:
        ports = one.hub.open_epoch(EpochMemory(epoch=1, node_of_rank=[0], plan_bytes=1 << 20, result_bytes=100))
        one.open(1)
        line = one.hub._relays[0].line
        while not line.wants_write:
            ports.plans.send(bytes(1 << 20), SOON_S)
        line.max_queued_bytes = line.queued_bytes + 10  # for the message, and not for its header
        with pytest.raises(ReaderLagging, match=r"plans: relay of node 0 does not take its messages"):
            ports.plans.send(bytes(10), 0.02)
        assert one.hub.fault() is None


def test_troubles_of_rings_are_raised_where_they_belong(two: Played) -> None:
    ports = two.hub.open_epoch(memory(1))
    two.open(1)
    two.relays[1].send(RelayFrame.RESULT, 1, frame_result(3, b"before"))
    two.relays[1].send(RelayFrame.TROUBLE, 1, encode(Trouble(rank=3, error="RingDamaged", text="torn")))
    two.relays[1].send(RelayFrame.TROUBLE, 1, encode(Trouble(rank=-1, error="ReaderDead", text="rank 1 is dead")))
    assert ports.results[3].receive(SOON_S) == b"before"
    for _ in range(2):
        with pytest.raises(RingDamaged, match="torn"):
            ports.results[3].receive(SOON_S)
        with pytest.raises(ReaderDead, match="rank 1 is dead"):
            ports.plans.send(b"", 0.0)
    assert two.hub.fault() is None


def test_one_message_for_all_ranks(two: Played) -> None:
    ports = two.hub.open_epoch(memory(1))
    two.open(1)
    ports.plans.send(memoryview(bytearray(b"plan")), 0.0)
    for relay in two.relays:
        assert frames_of(relay) == [Frame(RelayFrame.PLANS, 1, b"plan")]
    ports.plans.close()
    for relay in two.relays:
        assert frames_of(relay) == [Frame(RelayFrame.CLOSE, 1, b"")]
    with pytest.raises(RingClosed):
        ports.plans.send(b"", 0.0)


def test_a_look_at_all_ranks_is_one_look_at_all_relays(two: Played) -> None:
    ports = two.hub.open_epoch(memory(1))
    two.open(1)
    two.poll()
    before = two.hub.num_polls
    for look in range(3):  # the first one may count on the polls before
        assert [inbox.try_receive() for inbox in ports.results] == [None] * 4
        assert two.hub.num_polls - before == look
    two.relays[1].send(RelayFrame.RESULT, 1, frame_result(3, b"late"))
    (received,) = [data for _ in range(500) for inbox in ports.results if (data := inbox.try_receive()) is not None]
    assert received == b"late"


def test_missing_relays_are_named() -> None:
    hub = RelayHub()
    with pytest.raises(RelayLost, match="relay of node 0: not connected"):
        hub.open_epoch(memory(1))
    hub.close()


def test_filenos_wake_a_loop_and_close_ends_the_relays(two: Played) -> None:
    assert len(two.hub.filenos()) == 2
    assert two.hub.nodes == [0, 1]
    two.hub.close()
    two.hub.close()
    assert two.hub.filenos() == []
    assert all(closed_by_peer(relay) or closed_by_peer(relay) for relay in two.relays)


def test_sizes_of_this_file_fit() -> None:
    assert max(PLAN_BYTES, RESULT_BYTES) < 65536  # so that the bound of 64 KiB is what is tested above
