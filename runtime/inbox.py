"""The controller's end of a rank's result ring, from before the ring exists until after its rank has ended."""

from __future__ import annotations

import os
import time

from runtime.ring import RingClosed, RingReader, RingTimeout, WriterDead
from runtime.ring_layout import MAGIC


class Inbox:
    """The controller's end of one rank's result ring, which that rank makes when it gets round to it."""

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        self._reader: RingReader | None = None

    def try_receive(self) -> bytes | None:
        """The next message if there is one; nothing more comes from a rank that has ended."""
        if self._reader is None:
            if os.pread(self._fd, len(MAGIC), 0) != MAGIC:
                return None
            self._reader = RingReader(self._fd, 0)
        try:
            return self._reader.try_receive()
        except (WriterDead, RingClosed):
            return None

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; None when none has come within `timeout_s`."""
        assert self._reader is not None, "the rank has not reported yet"
        try:
            return self._reader.receive(timeout_s)
        except RingTimeout:
            return None
        except (WriterDead, RingClosed):
            time.sleep(timeout_s)
            return None

    def close(self) -> None:
        """May be called twice."""
        if self._reader is not None:
            self._reader.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
