"""The sending end of a ring."""

from __future__ import annotations

import time
from collections.abc import Sequence

from runtime import ring_layout as layout
from runtime.checksum import checksum
from runtime.futex import Sleeper
from runtime.liveness import ProcessId
from runtime.ring_errors import (
    MessageTooLarge,
    ReaderDead,
    ReaderLagging,
    ReaderNotAttached,
    RingClosed,
    RingDamaged,
    RingError,
)
from runtime.ring_layout import ABSENT, CLOSED, DATA, OPEN, RECORD_BYTES, slot
from runtime.ring_segment import RingEnd, Segment


class RingWriter(RingEnd):
    """The sending end of a fresh segment. `readers` are the names that errors give to reader 0, 1, ..."""

    def __init__(self, fd: int, name: str, readers: Sequence[str], *, sleeper: Sleeper | None = None) -> None:
        super().__init__(Segment(fd, sleeper))
        try:
            layout.write_header(self._segment.memory, name, readers)
        except BaseException:
            self._segment.close()
            raise
        self._segment.store(layout.WRITER_STATE, OPEN)
        self.name, self.readers = name, tuple(readers)
        self._sleep_words = range(layout.READER_SLEEPS >> 3, (layout.READER_SLEEPS + len(readers) + 7) >> 3)
        self._free_until = self._data_bytes  # position that no record may pass before a reader was seen to move

    def send(self, data: bytes | bytearray | memoryview, timeout_s: float) -> None:
        """Send to all readers. If any of them makes this impossible, nothing is sent and the ring stays usable.

        Raises MessageTooLarge; ReaderLagging, ReaderNotAttached (`timeout_s` passed and the ring is still full);
        ReaderDead, RingClosed (a reader is gone, noticed within 0.2 s even while there is room).
        """
        if isinstance(data, memoryview):
            data = data.cast("B")
        length = len(data)
        self._ensure_open()
        if length > self.capacity:
            raise MessageTooLarge(f"ring {self.name!r}: a message of {length} bytes, expected at most {self.capacity}")
        end = self._position + layout.record_bytes(length)
        if self._check_is_due():
            self.check_readers()
        if end > self._free_until:
            self._make_room(end - self._data_bytes, timeout_s)
        self._write(data, length, self.sequence + 1)
        self._position, self.sequence = end, self.sequence + 1
        self._publish()

    def drain(self, timeout_s: float) -> None:
        """Wait until every reader has taken and verified everything sent. Raises like `send`."""
        self._ensure_open()
        self._make_room(self._position, timeout_s)

    def wait_attached(self, timeout_s: float) -> None:
        """Wait until every reader is there. Raises ReaderNotAttached, naming the first that is not."""
        self._ensure_open()
        deadline = time.perf_counter() + timeout_s
        for index in range(len(self.readers)):
            state, flag = slot(index) + layout.SLOT_STATE, (layout.WRITER_WAITS_FOR, index + 1)
            if self._segment.word(state) == ABSENT:
                left = deadline - time.perf_counter()
                if not self._segment.wait(state, ABSENT, flag, left, lambda: None):
                    raise ReaderNotAttached(f"{self._who(index)} has not attached within {timeout_s:g} s")

    def check_readers(self) -> None:
        """Raises ReaderDead or RingClosed for the first reader that was there and is gone."""
        self._ensure_open()
        for index in range(len(self.readers)):
            self._check_reader(index)

    def close(self) -> None:
        """Tell the readers that nothing more will come, and unmap. May be called twice."""
        if self._segment.is_open:
            self._segment.store(layout.WRITER_STATE, CLOSED)
            self._segment.wake(layout.SEQUENCE)
            self._segment.close()

    def _write(self, data: bytes | bytearray | memoryview, length: int, sequence: int) -> None:
        """Put a record behind the last one; what does not fit before the end of the memory goes on at its beginning."""
        memory, words, at = self._segment.memory, self._segment.words, self._position % self._data_bytes
        record = (DATA + at) >> 3
        words[record] = sequence
        words[record + 1] = length
        words[record + 2] = checksum(data, sequence)
        words[record + 3] = 0
        start = at + RECORD_BYTES
        first = self._data_bytes - start
        if length <= first:
            memory[DATA + start : DATA + start + length] = data
        else:
            memory[DATA + start : DATA + self._data_bytes] = memoryview(data)[:first]
            memory[DATA : DATA + length - first] = memoryview(data)[first:]

    def _publish(self) -> None:
        segment, words = self._segment, self._segment.words
        words[layout.SEQUENCE >> 3] = self.sequence
        segment.fence()  # else we could miss a reader that is just about to sleep
        for index in self._sleep_words:
            if words[index]:
                segment.wake(layout.SEQUENCE)
                return

    def _make_room(self, target: int, timeout_s: float) -> None:
        """Wait until every reader has taken `target` bytes."""
        deadline = time.perf_counter() + timeout_s
        taken = [self._wait_for(index, target, timeout_s, deadline) for index in range(len(self.readers))]
        self._free_until = min(taken) + self._data_bytes

    def _wait_for(self, index: int, target: int, timeout_s: float, deadline: float) -> int:
        """Position of a reader, at least `target`."""
        segment, offset, flag = self._segment, slot(index) + layout.SLOT_POSITION, (layout.WRITER_WAITS_FOR, index + 1)
        while (taken := segment.word(offset)) < target:
            left = deadline - time.perf_counter()
            moved = segment.wait(offset, taken, flag, left, lambda: self._check_reader(index))
            if not moved and segment.word(offset) < target:
                raise self._late(index, timeout_s)
        if taken > self._position:
            raise RingDamaged(f"{self._who(index)} claims to have taken {taken} bytes of {self._position} sent")
        return taken

    def _check_reader(self, index: int) -> None:
        state = self._segment.word(slot(index) + layout.SLOT_STATE)
        if state == CLOSED:
            raise RingClosed(f"{self._who(index)} has closed its end")
        if state == OPEN and not self._process(index).is_alive():
            raise ReaderDead(f"{self._who(index)} is dead: process {self._process(index).pid} is gone")

    def _late(self, index: int, timeout_s: float) -> RingError:
        if self._segment.word(slot(index) + layout.SLOT_STATE) == ABSENT:
            return ReaderNotAttached(f"{self._who(index)} has not attached within {timeout_s:g} s")
        process, behind = self._process(index), self._position - self._segment.word(slot(index) + layout.SLOT_POSITION)
        return ReaderLagging(
            f"{self._who(index)} is {behind} bytes behind after {timeout_s:g} s: process {process.pid} is alive "
            f"(state {process.state()}) but does not take its messages"
        )

    def _ensure_open(self) -> None:
        if not self._segment.is_open:
            raise RingClosed(f"ring {self.name!r}: this end is closed")

    def _process(self, index: int) -> ProcessId:
        at = slot(index)
        return ProcessId(self._segment.word(at + layout.SLOT_PID), self._segment.word(at + layout.SLOT_START))

    def _who(self, index: int) -> str:
        return f"ring {self.name!r}: reader {index} ({self.readers[index]})"
