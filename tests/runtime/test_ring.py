"""The ring delivers: every size at every place, readers at their own pace, sleeping and waking, idle and light."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from runtime.checksum import SHORT_BYTES, checksum
from runtime.futex import Futex, Naps, Sleeper, futex_number
from runtime.ring import (
    ReaderLagging,
    RingClosed,
    RingReader,
    RingTimeout,
    RingWriter,
    create_segment,
)

ROOT = Path(__file__).resolve().parents[2]
SOON_S, NEVER_S = 5.0, 0.0


class Ring:
    """A writer and its readers in one process, all closed at the end of a test."""

    def __init__(self, stack: ExitStack, capacity: int, readers: int, sleeper: Sleeper | None) -> None:
        fd = create_segment("plans", capacity)
        stack.callback(os.close, fd)
        names = [f"rank {index}" for index in range(readers)]
        self.writer = stack.enter_context(RingWriter(fd, "plans", names, sleeper=sleeper))
        self.readers = [stack.enter_context(RingReader(fd, index, sleeper=sleeper)) for index in range(readers)]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ring(stack: ExitStack, capacity: int, readers: int = 1, sleeper: Sleeper | None = None) -> Ring:
    return Ring(stack, capacity, readers, sleeper)


class Counting(Naps):
    """Counts what would be system calls."""

    def __init__(self) -> None:
        self.waits = self.wakes = 0

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        self.waits += 1
        super().wait(address, seen, timeout_s)

    def wake(self, address: int) -> None:
        self.wakes += 1


SLEEPERS = [pytest.param(Futex, marks=pytest.mark.skipif(futex_number() is None, reason="no futex here")), Naps]


@pytest.mark.parametrize("capacity", [1, 200, 255, 256])
def test_every_size_at_every_place(stack: ExitStack, capacity: int) -> None:
    both, rng = ring(stack, capacity), random.Random(0)
    for size in [*range(capacity + 1), *range(capacity, -1, -1), *(rng.randint(0, capacity) for _ in range(500))]:
        message = rng.randbytes(size)
        both.writer.send(message, NEVER_S)
        assert both.readers[0].receive(NEVER_S) == message


def test_readers_at_their_own_pace(stack: ExitStack) -> None:
    both, rng = ring(stack, 4096, readers=3), random.Random(1)
    sent: list[bytes] = []
    got: list[list[bytes]] = [[], [], []]
    refused = 0
    for _ in range(3000):
        message = rng.randbytes(rng.choice([0, 8, 100, 3000]))
        try:
            both.writer.send(message, NEVER_S)
            sent.append(message)
        except ReaderLagging:
            refused += 1
        for index, pace in enumerate([0.9, 0.6, 0.5]):
            while rng.random() < pace and (received := both.readers[index].try_receive()) is not None:
                got[index].append(received)
    for index, reader in enumerate(both.readers):
        while (received := reader.try_receive()) is not None:
            got[index].append(received)
    assert refused > 100
    assert got == [sent, sent, sent]
    assert [end.sequence for end in (both.writer, *both.readers)] == [len(sent)] * 4


def test_what_was_received_stays(stack: ExitStack) -> None:
    both = ring(stack, 32)
    both.writer.send(b"first", NEVER_S)
    first = both.readers[0].receive(NEVER_S)
    for _ in range(10):
        both.writer.send(b"x" * 32, NEVER_S)
        both.readers[0].receive(NEVER_S)
    assert first == b"first"


@pytest.mark.parametrize("data", [bytearray(b"abcd"), memoryview(b"abcd"), memoryview(b"xabcdx")[1:5]])
def test_any_bytes(stack: ExitStack, data: bytearray | memoryview) -> None:
    both = ring(stack, 8)
    for _ in range(5):  # at and across the end of the memory
        both.writer.send(data, NEVER_S)
        assert both.readers[0].receive(NEVER_S) == b"abcd"


def test_a_view_of_words_is_sent_as_its_bytes(stack: ExitStack) -> None:
    both = ring(stack, 64)
    both.writer.send(memoryview(bytes(range(16))).cast("Q"), NEVER_S)
    assert both.readers[0].receive(NEVER_S) == bytes(range(16))


def test_a_late_reader_misses_nothing() -> None:
    fd = create_segment("plans", 1000)
    with RingWriter(fd, "plans", ["rank 0"]) as writer:
        for number in range(10):
            writer.send(bytes([number]), NEVER_S)
        with RingReader(fd, 0) as reader:
            assert [reader.receive(NEVER_S) for _ in range(10)] == [bytes([number]) for number in range(10)]
    os.close(fd)


@pytest.mark.parametrize("sleeper", SLEEPERS)
def test_sleepers_are_woken(stack: ExitStack, sleeper: type[Sleeper]) -> None:
    """Both sides sleep in turn: the reader until something comes, the writer until there is room and until drained."""
    both = ring(stack, 64, sleeper=sleeper())
    got: list[bytes] = []

    def read() -> None:
        for number in range(30):
            if number % 3 == 0:
                time.sleep(0.005)
            got.append(both.readers[0].receive(SOON_S))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(30):
        if number % 7 == 0:
            both.writer.drain(SOON_S)
            time.sleep(0.005)
        both.writer.send(bytes([number]) * 60, SOON_S)
    both.writer.drain(SOON_S)
    thread.join()
    assert got == [bytes([number]) * 60 for number in range(30)]


@pytest.mark.skipif(sys.platform != "linux", reason="futexes are Linux's")
def test_a_sleeper_hears_of_a_message_by_a_wake_up(stack: ExitStack) -> None:
    class Deep(Futex):
        """Would oversleep without a wake-up."""

        def wait(self, address: int, seen: int, timeout_s: float) -> None:
            asleep.set()
            super().wait(address, seen, 60.0)

    assert futex_number() is not None
    asleep = threading.Event()
    both = ring(stack, 64, sleeper=Deep())
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(both.readers[0].receive(None)))
    thread.start()
    asleep.wait()
    both.writer.send(b"wake up", NEVER_S)
    thread.join(SOON_S)
    assert got == [b"wake up"]


def test_nobody_asleep_no_system_call(stack: ExitStack) -> None:
    counting = Counting()
    both = ring(stack, 4096, readers=2, sleeper=counting)
    woken = counting.wakes
    for _ in range(100):
        both.writer.send(bytes(1000), NEVER_S)
        assert [len(reader.receive(NEVER_S)) for reader in both.readers] == [1000, 1000]
        both.writer.drain(NEVER_S)
    assert (counting.waits, counting.wakes - woken) == (0, 0)


def test_a_timeout_is_kept_without_sleeping(stack: ExitStack) -> None:
    both = ring(stack, 64, sleeper=(counting := Counting()))
    for _ in range(3):
        with pytest.raises(RingTimeout, match=r"ring 'plans': reader 0 \(rank 0\): no message within 0 s"):
            both.readers[0].receive(0.0)
    assert counting.waits == 0
    assert both.readers[0].try_receive() is None


@pytest.mark.parametrize("waits_for", ["message", "room"])
def test_waiting_costs_less_than_two_percent_of_a_core(stack: ExitStack, waits_for: str) -> None:
    both = ring(stack, 64)
    both.writer.send(bytes(64), NEVER_S)
    start, seconds = time.thread_time(), 2.0
    if waits_for == "room":
        with pytest.raises(ReaderLagging):
            both.writer.send(bytes(64), seconds)
    else:
        both.readers[0].receive(NEVER_S)
        with pytest.raises(RingTimeout):
            both.readers[0].receive(seconds)
    assert time.thread_time() - start < 0.02 * seconds


@pytest.mark.parametrize("memfd", [True, False])
def test_segments_have_no_name_and_leave_nothing(monkeypatch: pytest.MonkeyPatch, memfd: bool) -> None:
    if not memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    before, shm = _open_files(), _names("/dev/shm")
    with ExitStack() as stack:
        both = ring(stack, 1000)
        both.writer.send(b"there", NEVER_S)
        assert both.readers[0].receive(NEVER_S) == b"there"
        assert _names("/dev/shm") == shm
    assert _open_files() == before


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux")
def test_a_process_that_did_not_inherit_can_open_it() -> None:
    fd = create_segment("plans", 1000)
    with RingWriter(fd, "plans", ["rank 0"]) as writer:
        other = os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR)
        with RingReader(other, 0) as reader:
            os.close(other)
            os.close(fd)  # both ends have a mapping of their own
            writer.send(b"there", NEVER_S)
            assert reader.receive(NEVER_S) == b"there"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux")
def test_nobody_can_cut_the_memory_away() -> None:
    fd = create_segment("plans", 1000)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


def test_the_writer_can_be_interrupted_between_writing_and_publishing(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ring(stack, 1000)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(both.writer, "_publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            both.writer.send(b"one", NEVER_S)
    assert both.readers[0].try_receive() is None
    both.writer.send(b"two", NEVER_S)
    assert [both.readers[0].receive(NEVER_S), both.readers[0].receive(NEVER_S)] == [b"one", b"two"]


def test_closing_is_heard_after_everything_sent(stack: ExitStack) -> None:
    both = ring(stack, 1000)
    both.writer.send(b"last", NEVER_S)
    both.writer.close()
    both.writer.close()
    assert both.readers[0].receive(NEVER_S) == b"last"
    with pytest.raises(RingClosed, match="closed the ring after 1 messages"):
        both.readers[0].receive(SOON_S)


def test_the_checksum_sees_changes() -> None:
    rng = random.Random(2)
    for size in (0, 1, 7, 8, 9, 1000, SHORT_BYTES, SHORT_BYTES + 1, 65536, 65543):
        data = bytearray(rng.randbytes(size))
        seen = {checksum(data, 1), checksum(data, 2), checksum(data + b"\0", 1)}
        for at in {0, size // 2, size - 1} if size else set():
            data[at] ^= 1 << rng.randrange(8)
            seen.add(checksum(data, 1))
        assert len(seen) == 3 + min(size, 3)
        assert all(0 <= value < 1 << 64 for value in seen)
        assert checksum(bytes(data), 3) == checksum(memoryview(data), 3) == checksum(data, 3)


@pytest.mark.parametrize("module", ["runtime.ring", "launch.bench_channel"])
def test_a_reader_process_imports_nothing_heavy(module: str) -> None:
    heavy = ("torch", "pydantic", "tokenizers", "safetensors", "typer", "rich", "multiprocessing.shared_memory")
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _names(folder: str) -> Sequence[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else ()
