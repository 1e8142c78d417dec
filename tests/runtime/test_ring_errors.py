"""Every fault of a ring has its own name, tells which ring and which reader, and leaves the others unharmed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from runtime import ring_layout as layout
from runtime.liveness import ProcessId
from runtime.ring import (
    MessageTooLarge,
    ReaderDead,
    ReaderLagging,
    ReaderNotAttached,
    RingClosed,
    RingDamaged,
    RingError,
    RingReader,
    RingTimeout,
    RingWriter,
    WriterDead,
    create_segment,
)
from runtime.ring_segment import Segment
from tests.runtime.ring_process import Storm, go, spawned

SOON_S, NEVER_S, NOTICED_S = 5.0, 0.0, 1.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def fd(stack: ExitStack) -> int:
    fd = create_segment("plans", 1000)
    stack.callback(os.close, fd)
    return fd


@pytest.fixture
def writer(stack: ExitStack, fd: int) -> RingWriter:
    return stack.enter_context(RingWriter(fd, "plans", ["rank 4", "rank 5"]))


@pytest.fixture
def readers(stack: ExitStack, fd: int, writer: RingWriter) -> list[RingReader]:
    return [stack.enter_context(RingReader(fd, index)) for index in range(2)]


@pytest.fixture
def raw(stack: ExitStack, fd: int) -> Segment:
    segment = Segment(fd)
    stack.callback(segment.close)
    return segment


class TestWriter:
    def test_message_too_large(self, writer: RingWriter, readers: list[RingReader]) -> None:
        assert writer.capacity >= 1000
        size = writer.capacity + 1
        with pytest.raises(MessageTooLarge, match=f"'plans': a message of {size} bytes, expected at most {size - 1}"):
            writer.send(bytes(size), NEVER_S)
        writer.send(bytes(writer.capacity), NEVER_S)
        assert len(readers[0].receive(NEVER_S)) == writer.capacity

    def test_lagging_reader(self, writer: RingWriter, readers: list[RingReader]) -> None:
        writer.send(bytes(1000), NEVER_S)
        readers[0].receive(NEVER_S)
        said = r"'plans': reader 1 \(rank 5\) is 1056 bytes behind after 0.02 s"
        with pytest.raises(ReaderLagging, match=said) as error:
            writer.send(b"next", 0.02)
        assert f"process {os.getpid()} is alive (state " in str(error.value)
        readers[1].receive(NEVER_S)
        writer.send(b"next", NEVER_S)  # nothing was lost by the refusal
        assert [reader.receive(NEVER_S) for reader in readers] == [b"next", b"next"]

    def test_lagging_reader_in_drain(self, writer: RingWriter, readers: list[RingReader]) -> None:
        writer.send(b"x", NEVER_S)
        with pytest.raises(ReaderLagging, match=r"reader 0 \(rank 4\)"):
            writer.drain(0.01)

    def test_reader_not_attached(self, fd: int, writer: RingWriter) -> None:
        for call in (writer.wait_attached, writer.drain, lambda timeout_s: writer.send(bytes(1000), timeout_s)):
            with pytest.raises(ReaderNotAttached, match=r"'plans': reader 0 \(rank 4\) has not attached within 0.01 s"):
                call(0.01)
            if call == writer.wait_attached:
                writer.send(bytes(1000), NEVER_S)
        with RingReader(fd, 0), pytest.raises(ReaderNotAttached, match=r"reader 1 \(rank 5\)"):
            writer.wait_attached(0.01)

    def test_wait_attached_ends_when_all_are_there(self, stack: ExitStack, fd: int, writer: RingWriter) -> None:
        timers = [threading.Timer(0.02, lambda i=i: stack.enter_context(RingReader(fd, i))) for i in range(2)]
        for timer in timers:
            timer.start()
        writer.wait_attached(SOON_S)
        for timer in timers:
            timer.join()
        writer.check_readers()

    @pytest.mark.parametrize("full", [True, False])
    def test_dead_reader(self, full: bool) -> None:
        """It stays a zombie while it is looked for, as a child of the controller does."""
        storm = Storm.of(0)
        fd = create_segment("plans", 1 << 20)
        roles = [{"role": "read", "storm": storm.__dict__ | {"late_s": [0.0], "naps": [0.0]}, "index": 0}]
        with RingWriter(fd, "plans", ["rank 4"]) as writer, spawned(fd, *roles) as processes:
            go(processes)
            writer.wait_attached(SOON_S)
            processes[0].send_signal(signal.SIGSTOP)
            processes[0].kill()
            start, message = time.monotonic(), bytes(1 << 20 if full else 8)
            with pytest.raises(ReaderDead, match=rf"reader 0 \(rank 4\) is dead: process {processes[0].pid} is gone"):
                _send_until(writer, message, start + SOON_S)
            assert time.monotonic() - start < NOTICED_S
            assert processes[0].returncode is None
            with pytest.raises(ReaderDead):
                writer.check_readers()
        os.close(fd)

    def test_stopped_reader_is_told_apart(self) -> None:
        fd = create_segment("plans", 1000)
        roles = [{"role": "read", "storm": Storm.of(0).__dict__ | {"late_s": [0.0], "naps": [0.0]}, "index": 0}]
        with RingWriter(fd, "plans", ["rank 4"]) as writer, spawned(fd, *roles) as processes:
            go(processes)
            writer.wait_attached(SOON_S)
            processes[0].send_signal(signal.SIGSTOP)
            while ProcessId.of(processes[0].pid).state() != "T":
                time.sleep(0.001)
            writer.send(bytes(1000), NEVER_S)
            with pytest.raises(ReaderLagging, match=r"is alive \(state T\) but does not take"):
                writer.send(bytes(1000), 0.1)
        os.close(fd)

    def test_reader_that_left(self, writer: RingWriter, readers: list[RingReader]) -> None:
        writer.send(b"x", NEVER_S)
        readers[0].receive(NEVER_S)
        readers[0].close()
        readers[1].close()
        for call in (writer.check_readers, lambda: writer.drain(SOON_S), lambda: writer.send(bytes(1000), SOON_S)):
            with pytest.raises(RingClosed, match=r"'plans': reader [01] \(rank [45]\) has closed its end"):
                call()

    def test_reader_that_claims_too_much(self, writer: RingWriter, readers: list[RingReader], raw: Segment) -> None:
        raw.store(layout.slot(1) + layout.SLOT_POSITION, 1 << 40)
        with pytest.raises(RingDamaged, match=r"reader 1 \(rank 5\) claims to have taken 1099511627776 bytes of 0"):
            writer.drain(NEVER_S)


def _send_until(writer: RingWriter, message: bytes, deadline: float) -> None:
    while time.monotonic() < deadline:
        writer.send(message, SOON_S)
        time.sleep(0.001)


class TestReader:
    @pytest.mark.parametrize("death", ["unpublished", "half"])
    def test_dead_writer_mid_write(self, death: str) -> None:
        """What it had published is read, what it was writing is not seen, and then its death is named."""
        storm = Storm(0, 1 << 16, (1000,) * 100, (0.0,), (0.0,), death, 0, at=3)
        fd = create_segment("plans", storm.capacity)
        with spawned(fd, {"role": "write", "storm": storm.__dict__}) as processes, RingReader(fd, 0) as reader:
            go(processes)
            got = [reader.receive(SOON_S)[8:] for _ in range(3)]
            assert got == [storm.payload(number) for number in range(3)]
            start = time.monotonic()
            named = rf"ring 'storm': reader 0 \(rank 0\): writer process {processes[0].pid} died after 3 messages"
            with pytest.raises(WriterDead, match=named):
                reader.receive(None)
            assert time.monotonic() - start < NOTICED_S
            time.sleep(0.25)
            with pytest.raises(WriterDead):
                reader.try_receive()
        os.close(fd)

    def test_timeout(self, readers: list[RingReader]) -> None:
        with pytest.raises(RingTimeout, match=r"ring 'plans': reader 1 \(rank 5\): no message within 0.12 s"):
            readers[1].receive(0.12)

    def test_closed(self, writer: RingWriter, readers: list[RingReader]) -> None:
        threading.Timer(0.02, writer.close).start()
        with pytest.raises(RingClosed, match=r"'plans': reader 0 \(rank 4\): the writer has closed the ring after 0"):
            readers[0].receive(None)
        time.sleep(0.25)
        with pytest.raises(RingClosed):
            readers[1].try_receive()

    def test_own_end_closed(self, writer: RingWriter, readers: list[RingReader]) -> None:
        for end in (*readers, writer):
            end.close()
        calls: list[Callable[[], object]] = [
            lambda: readers[0].receive(NEVER_S), readers[0].try_receive, lambda: writer.send(b"", NEVER_S),
            lambda: writer.drain(NEVER_S), lambda: writer.wait_attached(NEVER_S), writer.check_readers,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(RingClosed, match="this end is closed"):
                call()

    @pytest.mark.parametrize(
        ("offset", "said"),
        [
            (0, "found message 2 / 0, expected 1 / 0"),
            (8, "message 1 has checksum"),
            (10, "message 1 of 197608 bytes, expected at most 1024"),
            (15, "message 1 of [0-9]+ bytes, expected at most"),
            (16, "message 1 has checksum 0x[0-9a-f]+, expected"),
            (24, "found message 1 / 3, expected 1 / 0"),
            (32, "message 1 has checksum"),
            (32 + 999, "message 1 has checksum"),
        ],
    )
    def test_damaged_record(
        self, writer: RingWriter, readers: list[RingReader], raw: Segment, offset: int, said: str
    ) -> None:
        writer.send(bytes(1000), NEVER_S)
        raw.memory[layout.DATA + offset] ^= 0x03
        for _ in range(2):  # and it stays damaged
            with pytest.raises(RingDamaged, match=rf"ring 'plans': reader 0 \(rank 4\): {said}"):
                readers[0].receive(NEVER_S)
        raw.memory[layout.DATA + offset] ^= 0x03
        assert readers[0].receive(NEVER_S) == bytes(1000)

    def test_damage_in_a_long_message(self, stack: ExitStack) -> None:
        fd = create_segment("plans", 100_000)
        stack.callback(os.close, fd)
        writer = stack.enter_context(RingWriter(fd, "plans", ["rank 4"]))
        reader, raw = stack.enter_context(RingReader(fd, 0)), Segment(fd)
        stack.callback(raw.close)
        writer.send(bytes(100_000), NEVER_S)
        raw.memory[layout.DATA + 77_777] ^= 1
        with pytest.raises(RingDamaged, match="message 1 has checksum"):
            reader.receive(NEVER_S)

    def test_publishing_before_writing_is_seen_as_a_tear(self, writer: RingWriter, readers: list[RingReader]) -> None:
        """The control: a writer that does it in the wrong order is found out by the checks."""
        writer.send(b"a" * 100, NEVER_S)
        readers[0].receive(NEVER_S)
        writer.sequence += 1
        writer._publish()
        with pytest.raises(RingDamaged, match="found message 0 / 0, expected 2 / 0"):
            readers[0].receive(NEVER_S)

    def test_a_sequence_number_that_runs_back(
        self, writer: RingWriter, readers: list[RingReader], raw: Segment
    ) -> None:
        writer.send(b"a", NEVER_S)
        readers[0].receive(NEVER_S)
        raw.store(layout.SEQUENCE, 0)
        with pytest.raises(RingDamaged, match="found message 0 / 0, expected 2 / 0"):
            readers[0].receive(NEVER_S)


class TestAttaching:
    @pytest.mark.parametrize(
        ("offset", "said"),
        [
            (0, "no ring: magic b'OKSTRING', expected b'LKSTRING'"),
            (8, "ring 'plans' has version 2, expected 1"),
            (12, "ring 'plans': header has checksum"),
            (16, "ring 'plans': header has checksum"),
            (32, "ring 'plans': header has checksum"),
        ],
    )
    def test_damaged_header(self, fd: int, writer: RingWriter, raw: Segment, offset: int, said: str) -> None:
        raw.memory[offset] ^= 0x03
        with pytest.raises(RingDamaged, match=re.escape(said)):
            RingReader(fd, 0)

    def test_no_writer_yet(self, fd: int) -> None:
        with pytest.raises(RingDamaged, match="no ring: magic"):
            RingReader(fd, 0)

    def test_a_ring_copied_to_a_segment_of_another_size(self, fd: int, writer: RingWriter, raw: Segment) -> None:
        other = create_segment("other", 5000)
        segment = Segment(other)
        segment.memory[: layout.DATA] = raw.memory[: layout.DATA]
        with pytest.raises(RingDamaged, match="header speaks of 1056 data bytes, mapped are 5056"):
            RingReader(other, 0)
        segment.close()
        os.close(other)

    @pytest.mark.parametrize("index", [-1, 2])
    def test_index_out_of_range(self, fd: int, writer: RingWriter, index: int) -> None:
        with pytest.raises(ValueError, match=f"ring 'plans': reader {index} of 2"):
            RingReader(fd, index)

    def test_index_taken(self, fd: int, readers: list[RingReader]) -> None:
        readers[0].close()
        for index in range(2):
            with pytest.raises(ValueError, match=f"process {os.getpid()} is or was reader {index}"):
                RingReader(fd, index)

    def test_second_writer(self, fd: int, writer: RingWriter) -> None:
        with pytest.raises(ValueError, match="the segment has had a writer already"):
            RingWriter(fd, "again", ["rank 0"])

    @pytest.mark.parametrize(
        ("name", "readers", "said"),
        [
            ("x", [], "ring 'x' has 0 readers: expected 1..64"),
            ("x", ["r"] * 65, "ring 'x' has 65 readers: expected 1..64"),
            ("", ["r"], "name '' has 0 bytes: expected 1..64"),
            ("x" * 65, ["r"], "has 65 bytes: expected 1..64"),
            ("x", ["r" * 41], "has 41 bytes: expected 1..40"),
        ],
    )
    def test_names(self, fd: int, name: str, readers: list[str], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            RingWriter(fd, name, readers)

    @pytest.mark.parametrize("capacity", [0, -5, layout.MAX_CAPACITY + 1])
    def test_capacity(self, capacity: int) -> None:
        with pytest.raises(ValueError, match=f"capacity of ring 'x' = {capacity} bytes: expected 1..1073741824"):
            create_segment("x", capacity)

    def test_some_other_file(self, stack: ExitStack) -> None:
        read_end, write_end = os.pipe()
        stack.callback(os.close, read_end)
        stack.callback(os.close, write_end)
        with pytest.raises(ValueError, match="a segment of 0 bytes was not made by create_segment"):
            RingReader(read_end, 0)


def test_all_faults_have_one_root() -> None:
    faults = [
        MessageTooLarge, ReaderDead, ReaderLagging, ReaderNotAttached, RingClosed, RingDamaged, RingTimeout, WriterDead,
    ]  # fmt: skip
    assert all(issubclass(fault, RingError) and issubclass(fault, RuntimeError) for fault in faults)
    assert not any(issubclass(a, b) for a in faults for b in faults if a is not b)


class TestLiveness:
    def test_this_process(self) -> None:
        assert ProcessId.of(os.getpid()).is_alive()

    def test_child_zombie_and_gone(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        process = ProcessId.of(child.pid)
        assert process.is_alive()
        child.kill()
        deadline = time.monotonic() + SOON_S
        while process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not process.is_alive()
        assert process.state() == "Z"
        child.wait()
        assert process.state() == "X"
        assert child.stdin is not None
        child.stdin.close()

    @pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
    def test_a_pid_that_was_given_anew_is_somebody_else(self) -> None:
        me = ProcessId.of(os.getpid())
        assert not ProcessId(me.pid, me.start - 1).is_alive()
