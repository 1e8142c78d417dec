"""A thread that reads one rank's result ring and hands every message on, until the epoch or the rank has ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from runtime.ring import RingClosed, RingDamaged, RingError, RingReader, RingTimeout, WriterDead
from runtime.ring_layout import MAGIC

UNBORN_NAP_S = 0.01  # between two looks for a ring that its rank has not made yet
RECEIVE_S = 0.05  # how long a stopped thread may go on: as often as a ring looks whether its writer lives


class ResultPump:
    """One rank's way back. `forward` and `fail` are called from the thread; `forward` returns False to end it."""

    def __init__(
        self, rank: int, fd: int, forward: Callable[[int, bytes], bool], fail: Callable[[int, RingError], None]
    ) -> None:
        self._rank, self._fd = rank, os.dup(fd)  # the memory may be let go before this thread has noticed
        self._forward, self._fail = forward, fail
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lockstep-results-{rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, which it does within 0.1 s."""
        self._stop.set()

    def join(self) -> None:
        """Wait for its end, after `stop`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            reader = self._attached()
        finally:
            os.close(self._fd)
        if reader is None:
            return
        with reader:
            while not self._stop.is_set():
                try:
                    data = reader.receive(RECEIVE_S)
                except RingTimeout:
                    continue
                except (WriterDead, RingClosed):  # all it has sent is read; the keeper tells how it ended
                    return
                except RingError as error:
                    self._fail(self._rank, error)
                    return
                except OSError as error:  # the system did not let us look whether the rank lives
                    self._fail(self._rank, RingDamaged(str(error)))
                    return
                if not self._forward(self._rank, data):
                    return

    def _attached(self) -> RingReader | None:
        """The ring, once its rank has made it."""
        while os.pread(self._fd, len(MAGIC), 0) != MAGIC:
            if self._stop.wait(UNBORN_NAP_S):
                return None
        try:
            return RingReader(self._fd, 0, spin_turns=0)
        except (RingError, ValueError, OSError) as error:
            self._fail(self._rank, RingDamaged(str(error)))
            return None
