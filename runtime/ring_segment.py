"""One process's view of a ring's memory: single words stored whole, a fence, and waiting for the other side."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from runtime import ring_layout as layout
from runtime.futex import Sleeper, best_sleeper

SPIN_TURNS = 50  # 0.8 us each with a core to itself; counted, because on a shared core the time is others' time
SLICE_S = 0.05  # the longest sleep before a look at whether the other side lives
CHECK_EVERY_S = 0.2  # how often an end that need not wait has that look
LOW_HALF = 0 if sys.byteorder == "little" else 4


class Segment:
    """One process's mapping of a ring.

    Single words are stored through `words`, a view of native 64-bit integers: such a store is one instruction, and
    nobody sees half of it. `struct` with a fixed byte order, and slices, go byte by byte.
    """

    def __init__(self, fd: int, sleeper: Sleeper | None = None, spin_turns: int = SPIN_TURNS) -> None:
        size = os.fstat(fd).st_size
        self.data_bytes = layout.data_bytes(size)
        self.memory = mmap.mmap(fd, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self._bytes = memoryview(self.memory)
        self.words = self._bytes.cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._sleeper = sleeper or best_sleeper()
        self._spin_turns = spin_turns
        self._lock = threading.Lock()
        self.is_open = True

    def word(self, offset: int) -> int:
        """The 64-bit word at a byte offset."""
        return self.words[offset >> 3]

    def store(self, offset: int, value: int) -> None:
        """Store a 64-bit word at a byte offset, whole."""
        self.words[offset >> 3] = value

    def fence(self) -> None:
        """Order the stores before against the loads after, even against those (x86 lets a load overtake a store).

        Python has no fence; taking a lock is a compare-and-swap, which is one.
        """
        self._lock.acquire()
        self._lock.release()

    def wake(self, offset: int) -> None:
        """Wake who sleeps on the word at this offset."""
        self._sleeper.wake(self._address + offset + LOW_HALF)

    def wait(self, offset: int, seen: int, flag: tuple[int, int], timeout_s: float, check: Callable[[], None]) -> bool:
        """Wait until the word at `offset` is not `seen`; False after `timeout_s`.

        Gives way up to 50 times, looking each time, then sleeps with the byte `flag` = (offset, value) up, which asks
        the other side for a wake-up. `check` runs after every 50 ms of sleep and before a timeout; it may raise.
        """
        words, index = self.words, offset >> 3
        for _ in range(self._spin_turns if timeout_s > 0 else 0):
            os.sched_yield()
            if words[index] != seen:
                return True
        deadline = time.perf_counter() + timeout_s
        try:
            while True:
                self.memory[flag[0]] = flag[1]
                if (left := deadline - time.perf_counter()) > 0:
                    address = self._address + offset + LOW_HALF
                    self._sleeper.wait(address, seen & 0xFFFFFFFF, min(left, SLICE_S))
                if words[index] != seen:
                    return True
                check()
                if left <= 0:
                    return words[index] != seen
        finally:
            self.memory[flag[0]] = 0

    def close(self) -> None:
        """Unmap; may be called twice."""
        if self.is_open:
            self.is_open = False
            self.words.release()
            self._bytes.release()
            with contextlib.suppress(BufferError):  # somebody holds a view: unmapped when that goes
                self.memory.close()


class RingEnd:
    """What the writer and the readers share. An end belongs to one thread at a time."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._data_bytes = segment.data_bytes
        self._position = 0  # bytes written / taken since the beginning
        self._next_check = 0.0
        self.capacity = self._data_bytes - layout.RECORD_BYTES  # bytes of the largest message
        self.sequence = 0  # messages sent / received

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the ring."""
        raise NotImplementedError

    def _check_is_due(self) -> bool:
        """Whether it is time for a look at the other side (which costs 20 us; the question costs none)."""
        now = time.perf_counter()
        if now < self._next_check:
            return False
        self._next_check = now + CHECK_EVERY_S
        return True
