"""How a rank is called out of a collective that will never end, because a rank it waits for is gone."""

from __future__ import annotations

import os
from contextlib import suppress


class Aborted(RuntimeError):
    """The wait was called off: the ranks of this epoch do not meet again, and its groups are of no use any more."""


class AbortSignal:
    """Set by one thread, seen by another that waits for ranks: it raises `Aborted` within 0.1 s.

    Waits on descriptors also select on `fileno()`, which is readable while the signal is set. Linux only.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_set = False

    @property
    def is_set(self) -> bool:
        return self._is_set

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        """Call off every wait, those that have not begun too. Any thread; setting it twice changes nothing."""
        self._is_set = True
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Ready for the next epoch. For the thread that waits, once it has left its waits."""
        self._is_set = False
        with suppress(BlockingIOError):  # it was not set
            os.eventfd_read(self._fd)

    def raise_if_set(self) -> None:
        if self._is_set:
            raise Aborted("the exchange between ranks was called off")

    def close(self) -> None:
        """The descriptor goes; nobody may wait any more."""
        os.close(self._fd)
