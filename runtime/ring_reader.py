"""The receiving end of a ring."""

from __future__ import annotations

import os
import time

from runtime import ring_layout as layout
from runtime.checksum import checksum
from runtime.futex import Sleeper
from runtime.liveness import ProcessId
from runtime.ring_errors import RingClosed, RingDamaged, RingTimeout, WriterDead
from runtime.ring_layout import ABSENT, CLOSED, DATA, OPEN, RECORD_BYTES, slot
from runtime.ring_segment import SPIN_TURNS, RingEnd, Segment

SETTLE_S = 0.002


class RingReader(RingEnd):
    """One receiving end: the reader at `index`, which may attach late and misses nothing.

    `spin_turns` 0 is for threads: giving way holds the interpreter lock (Python 3.11), a futex sleep does not.
    """

    def __init__(
        self, fd: int, index: int, *, sleeper: Sleeper | None = None, spin_turns: int = SPIN_TURNS
    ) -> None:
        super().__init__(Segment(fd, sleeper, spin_turns))
        memory = self._segment.memory
        try:
            header = layout.read_header(memory)
            self.name, self.index, self.writer = header.name, index, header.writer
            self._claim(index, header.num_readers)
        except BaseException:
            self._segment.close()
            raise
        self.reader_name = layout.name_at(memory, slot(index) + layout.SLOT_NAME, layout.SLOT_NAME_BYTES)
        self._own_position = slot(index) + layout.SLOT_POSITION

    def receive(self, timeout_s: float | None) -> bytes:
        """The next message, verified; None waits for ever.

        Raises RingTimeout; RingDamaged; WriterDead or RingClosed once everything sent has been received.
        """
        self._ensure_open()
        if self._segment.words[layout.SEQUENCE >> 3] == self.sequence:
            self._wait(timeout_s)
        return self._take()

    def try_receive(self) -> bytes | None:
        """The next message if there is one. Raises like `receive`."""
        self._ensure_open()
        if self._segment.words[layout.SEQUENCE >> 3] != self.sequence:
            return self._take()
        if self._check_is_due():
            self._check_writer()
        return None

    def close(self) -> None:
        """Leave for good: the writer is told. May be called twice."""
        if self._segment.is_open:
            self._segment.store(slot(self.index) + layout.SLOT_STATE, CLOSED)
            self._segment.wake(self._own_position)
            self._segment.close()

    def _wait(self, timeout_s: float | None) -> None:
        left = float("inf") if timeout_s is None else timeout_s
        flag = (layout.READER_SLEEPS + self.index, 1)
        if not self._segment.wait(layout.SEQUENCE, self.sequence, flag, left, self._check_writer):
            raise RingTimeout(f"{self._who()}: no message within {left:g} s")

    def _take(self) -> bytes:
        data = self._verified()
        segment, words = self._segment, self._segment.words
        end = self._position + layout.record_bytes(len(data))
        self._position, self.sequence = end, self.sequence + 1  # no call in between: an interrupt finds both or none
        words[self._own_position >> 3] = end
        segment.fence()  # else we could miss a writer that is just about to sleep
        if words[layout.WRITER_WAITS_FOR >> 3] and segment.memory[layout.WRITER_WAITS_FOR] == self.index + 1:
            segment.wake(self._own_position)
        return data

    def _verified(self) -> bytes:
        """A copy of the next record's message. A fault is believed when it has lasted for 2 ms.

        x86 shows stores in their order; elsewhere the sequence number may be seen a moment before the record.
        """
        try:
            return self._copy(self.sequence + 1)
        except RingDamaged:
            deadline = time.perf_counter() + SETTLE_S
        while True:
            try:
                return self._copy(self.sequence + 1)
            except RingDamaged:
                if time.perf_counter() > deadline:
                    raise
                os.sched_yield()

    def _copy(self, expected: int) -> bytes:
        memory, words, at = self._segment.memory, self._segment.words, self._position % self._data_bytes
        record = (DATA + at) >> 3
        sequence, length, check, zero = words[record], words[record + 1], words[record + 2], words[record + 3]
        if sequence != expected or zero:
            raise RingDamaged(f"{self._who()}: found message {sequence} / {zero}, expected {expected} / 0")
        if length > self.capacity:
            raise RingDamaged(f"{self._who()}: message {sequence} of {length} bytes, expected at most {self.capacity}")
        start = at + RECORD_BYTES
        beyond = start + length - self._data_bytes
        if beyond <= 0:
            data = memory[DATA + start : DATA + start + length]
        else:
            data = memory[DATA + start : DATA + self._data_bytes] + memory[DATA : DATA + beyond]
        if (found := checksum(data, sequence)) != check:
            raise RingDamaged(f"{self._who()}: message {sequence} has checksum {found:#x}, expected {check:#x}")
        return data

    def _check_writer(self) -> None:
        """Raises if nothing can come any more and nothing is left."""
        closed = self._segment.word(layout.WRITER_STATE) == CLOSED
        if not closed and self.writer.is_alive():
            return
        if self._segment.word(layout.SEQUENCE) == self.sequence:  # looked at after: it may have sent, then ended
            if closed:
                raise RingClosed(f"{self._who()}: the writer has closed the ring after {self.sequence} messages")
            raise WriterDead(f"{self._who()}: writer process {self.writer.pid} died after {self.sequence} messages")

    def _claim(self, index: int, num_readers: int) -> None:
        at, memory = slot(index), self._segment
        if not 0 <= index < num_readers:
            raise ValueError(f"ring {self.name!r}: reader {index} of {num_readers}")
        if memory.word(at + layout.SLOT_STATE) != ABSENT:
            raise ValueError(
                f"ring {self.name!r}: process {memory.word(at + layout.SLOT_PID)} is or was reader {index}, "
                f"process {os.getpid()} cannot be: every ring has its readers once"
            )
        me = ProcessId.of(os.getpid())
        memory.store(at + layout.SLOT_PID, me.pid)
        memory.store(at + layout.SLOT_START, me.start)
        memory.store(at + layout.SLOT_STATE, OPEN)  # after what it speaks for
        memory.wake(at + layout.SLOT_STATE)

    def _ensure_open(self) -> None:
        if not self._segment.is_open:
            raise RingClosed(f"{self._who()}: this end is closed")

    def _who(self) -> str:
        return f"ring {self.name!r}: reader {self.index} ({self.reader_name})"
