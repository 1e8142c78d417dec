"""The memory of a node: what each rank is granted, plans that wait for room, and nothing left open."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from runtime.cluster.node_memory import MAX_WAITING, NodeMemory
from runtime.cluster.relay_messages import EpochMemory, GroupSegment, OpenEpoch, decode, encode
from runtime.ring import ReaderLagging, RingClosed, RingReader, RingWriter
from runtime.vitals import RankVitals, Vitals, page_size

PLAN_BYTES = 4000
MEMORY = EpochMemory(
    epoch=3, node_of_rank=[0, 1, 1, 0, 1], plan_bytes=PLAN_BYTES, result_bytes=500, slot_bytes=64,
    segments=[
        GroupSegment(name="tp", ranks=[1, 2], num_bytes=4096), GroupSegment(name="ep", ranks=[1, 2, 4], num_bytes=8192),
        GroupSegment(name="ep", ranks=[0, 3], num_bytes=8192),
    ],
)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def memory() -> Iterator[NodeMemory]:
    before = open_fds()
    memory = NodeMemory(3, MEMORY.of_node(1))
    yield memory
    memory.close()
    memory.close()
    assert open_fds() == before


def test_each_node_is_told_of_its_own_ranks_and_segments() -> None:
    assert MEMORY.nodes == [0, 1]
    opening = MEMORY.of_node(1)
    assert opening.ranks == [1, 2, 4]
    assert [(segment.name, segment.ranks) for segment in opening.segments] == [("tp", [1, 2]), ("ep", [1, 2, 4])]
    assert decode(OpenEpoch, encode(opening)) == opening


def test_a_segment_across_nodes_is_refused() -> None:
    memory = EpochMemory(
        epoch=1, node_of_rank=[0, 1], plan_bytes=1, result_bytes=1,
        segments=[GroupSegment(name="tp", ranks=[0, 1], num_bytes=1)],
    )
    with pytest.raises(ValueError, match=r"segment 'tp' has ranks \[0, 1\] on nodes \[0, 1\]"):
        memory.of_node(0)


def test_a_grant_holds_what_the_rank_shares(memory: NodeMemory) -> None:
    reply, fds = memory.grant(4)
    assert (reply.epoch, reply.index, reply.slot_bytes, reply.segments) == (3, 2, 64, ["ep"])
    other, other_fds = memory.grant(2)
    assert (other.index, other.segments) == (1, ["tp", "ep"])
    assert fds[0] == other_fds[0]
    assert fds[1] != other_fds[1]
    with mmap.mmap(fds[3], 8192) as ours, mmap.mmap(other_fds[4], 8192) as theirs:
        assert ours[:] == bytes(8192)
        ours[5] = 7
        assert theirs[5] == 7
    with pytest.raises(ValueError, match=r"rank 0 is not on this node, in epoch 3 it has \[1, 2, 4\]"):
        memory.grant(0)


def test_plans_vitals_and_results_are_there(memory: NodeMemory) -> None:
    _, (plans_fd, results_fd, vitals_fd, *_) = memory.grant(2)
    vitals = RankVitals(vitals_fd, 1)
    vitals.step(12)
    with RingReader(plans_fd, 1) as plans, RingWriter(results_fd, "results", ["controller"]) as results:
        memory.send_plans(b"one plan")
        assert plans.receive(1.0) == b"one plan"
        results.send(bytes(500), 1.0)
    vitals.close()
    assert len(memory.vitals()) == page_size(3)
    page = Vitals(vitals_fd, 3)
    assert [vital.step_id for vital in page.read()] == [0, 12, 0]
    page.close()


def test_plans_wait_for_room_and_keep_their_order(memory: NodeMemory) -> None:
    readers = [RingReader(memory.grant(rank)[1][0], index) for index, rank in enumerate((1, 2, 4))]
    messages = [bytes([number]) * 1500 for number in range(9)]
    behind = []
    for message in messages:
        memory.send_plans(message)
        behind.append(memory.is_behind)
    for message in messages:
        memory.flush_plans()
        assert [reader.receive(1.0) for reader in readers] == [message] * 3
    assert [*behind, memory.is_behind] == [False] * 2 + [True] * 7 + [False]
    for reader in readers:
        reader.close()


def test_a_reader_that_never_reads_is_named(memory: NodeMemory) -> None:
    readers = [RingReader(memory.grant(rank)[1][0], index) for index, rank in enumerate((1, 2, 4))]

    def send_on() -> None:
        for _ in range(2 * MAX_WAITING):
            memory.send_plans(bytes(PLAN_BYTES))
            for reader in readers[:2]:
                reader.try_receive()

    with pytest.raises(ReaderLagging, match=r"reader 2 \(rank 4\)"):
        send_on()
    memory.abandon_plans()
    memory.send_plans(b"nothing more goes in")
    assert not memory.is_behind
    for reader in readers:
        reader.close()


def test_readers_hear_of_the_end(memory: NodeMemory) -> None:
    reader = RingReader(memory.grant(1)[1][0], 0)
    memory.send_plans(b"last")
    memory.close()
    assert reader.receive(1.0) == b"last"
    with pytest.raises(RingClosed):
        reader.receive(1.0)
    reader.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"plan_bytes": 0}, "ring 'plans' = 0 bytes"), ({"result_bytes": 1 << 40}, "ring 'results-1'"),
        ({"segments": [GroupSegment(name="tp", ranks=[1], num_bytes=-1)]}, "memory 'tp' of -1 bytes"),
    ],
)
def test_sizes_that_cannot_be(changes: dict[str, object], text: str) -> None:
    before = open_fds()
    values = {"ranks": [1, 2], "plan_bytes": 10, "result_bytes": 10, "slot_bytes": 0, "segments": []} | changes
    with pytest.raises(ValueError, match=text):
        NodeMemory(1, OpenEpoch(**values))  # type: ignore[arg-type]
    assert open_fds() == before


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x80", encode(MEMORY.of_node(0))[:-1], encode(MEMORY.of_node(0)) + b"\0",
        encode(GroupSegment(name="tp", ranks=[1], num_bytes=3)),
        encode(OpenEpoch(ranks=[True], plan_bytes=1, result_bytes=1, slot_bytes=1, segments=[])),
        encode(OpenEpoch(ranks=[0], plan_bytes=1.5, result_bytes=1, slot_bytes=1, segments=[])),  # type: ignore[arg-type]
        encode(OpenEpoch(ranks=[0] * 1000, plan_bytes=1, result_bytes=1, slot_bytes=1, segments=[])),
        encode(OpenEpoch(ranks=[0], plan_bytes=-5, result_bytes=1, slot_bytes=1, segments=[])),
    ],
)
def test_messages_are_decoded_strictly(data: bytes) -> None:
    with pytest.raises(ValueError, match="OpenEpoch|GroupSegment"):
        decode(OpenEpoch, data)
