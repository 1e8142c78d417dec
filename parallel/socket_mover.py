"""A thread that moves messages the kernel cannot hold while the rank computes; it does not exist before there are any.

Small messages never meet it: the kernel sends them, and keeps them for the receiver.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Protocol


class Moved(Protocol):
    """A stream the mover serves. Both calls do what can be done at once, and take themselves off when all is done."""

    def fileno(self) -> int: ...

    def send_on(self) -> None: ...

    def receive_on(self) -> None: ...


class Mover:
    """Shared by all streams of a rank in one epoch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sending: set[Moved] = set()
        self._receiving: set[Moved] = set()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def send(self, stream: Moved) -> None:
        """`stream` has something to send."""
        with self._lock:
            self._sending.add(stream)
            self._ring()

    def sent(self, stream: Moved) -> None:
        """... and now it has not."""
        with self._lock:
            self._sending.discard(stream)

    def receive(self, stream: Moved) -> None:
        """`stream` expects more than the kernel may hold for it."""
        with self._lock:
            if stream not in self._receiving:
                self._receiving.add(stream)
                self._ring()

    def received(self, stream: Moved) -> None:
        """... and now it does not, or its owner receives."""
        with self._lock:
            self._receiving.discard(stream)

    def close(self, linger_s: float = 0.0) -> None:
        """The thread has ended when this returns; `linger_s` bounds how long it goes on sending what is left to send.

        A second time changes nothing.
        """
        deadline = time.monotonic() + linger_s
        while self._sends() and time.monotonic() < deadline:
            time.sleep(0.002)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
            os.eventfd_write(self._bell, 1)
        if thread is not None:
            thread.join()
        os.close(self._bell)

    def _sends(self) -> bool:
        with self._lock:
            return bool(self._sending) and not self._closed

    def _ring(self) -> None:
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
            self._thread.start()
        os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                sending, receiving = set(self._sending), set(self._receiving)
            poller = select.poll()
            poller.register(self._bell, select.POLLIN)
            streams = {stream.fileno(): stream for stream in sending | receiving}
            for fd, stream in streams.items():
                wanted = (select.POLLOUT if stream in sending else 0) | (select.POLLIN if stream in receiving else 0)
                poller.register(fd, wanted)
            for fd, _ in poller.poll():
                if fd == self._bell:
                    os.eventfd_read(self._bell)
                    continue
                if (stream := streams[fd]) in sending:
                    stream.send_on()
                if stream in receiving:
                    stream.receive_on()
