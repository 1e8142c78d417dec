"""The controller's door: a thread that takes connections and hands over the lines of keepers and relays.

Handshakes run on threads of their own, so that a peer that is slow, or does not belong here, keeps nobody waiting.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from runtime.cluster.keeper_messages import KEEPER_FRAME, Hello, decode_hello
from runtime.cluster.line import Frame, FrameDamaged, FrameLine, LineError, accept_line
from runtime.cluster.relay_hub import read_hello
from runtime.cluster.relay_messages import RelayHello

HANDSHAKE_S = 5.0
HELLO_S = 60.0  # a keeper looks at the files of its model before it says hello
MAX_AT_ONCE = 256  # connections that have not said hello
PAUSE_S = 0.05
MAX_REFUSALS = 8  # kept for messages


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A line and who is at its other end. `frames`: what it has sent since."""

    line: FrameLine
    hello: Hello | RelayHello
    frames: tuple[Frame, ...] = ()


class Acceptor:
    """Listens on `listener`, which is its own from now on, until it is closed."""

    def __init__(self, listener: socket.socket, *, secret: bytes, dead_after_s: float) -> None:
        self._listener, self._secret, self._dead_after_s = listener, secret, dead_after_s
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._slots = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._lock = threading.Lock()
        self._is_closed = False
        self._connections: set[socket.socket] = set()
        self.refusals: list[str] = []  # who was turned away and why, the last few
        host, port = listener.getsockname()[:2]
        self.address: tuple[str, int] = (str(host), int(port))
        self._thread = threading.Thread(target=self._accept, name="lockstep-acceptor", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable when somebody has arrived."""
        return self._event

    def take(self) -> list[Arrival]:
        """Everybody who has arrived since the last call."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        arrivals = []
        with suppress(queue.Empty):
            while True:
                arrivals.append(self._arrivals.get_nowait())
        return arrivals

    def close(self) -> None:
        """Nobody arrives any more. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for connection in self._connections:  # their threads end
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for arrival in self.take():
            arrival.line.close()
        with self._lock:
            os.close(self._event)
            self._event = -1

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(PAUSE_S)  # too many descriptors, or the peer has left already
                continue
            while not self._slots.acquire(timeout=PAUSE_S):  # who comes meanwhile waits at the listener
                if self._is_closed:
                    connection.close()
                    return
            with self._lock:
                if self._is_closed:  # while this one waited: nobody would shut it down any more
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._welcome, args=(connection,), name="lockstep-hello", daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            self._hand_over(_meet(connection, self._secret, self._dead_after_s))
        except (LineError, ValueError) as error:
            self.refusals = [*self.refusals, str(error)][-MAX_REFUSALS:]
        finally:
            with self._lock:
                self._connections.discard(connection)
            self._slots.release()

    def _hand_over(self, arrival: Arrival) -> None:
        with self._lock:
            if self._event < 0:
                arrival.line.close()
                return
            self._arrivals.put(arrival)
            os.eventfd_write(self._event, 1)


def _meet(connection: socket.socket, secret: bytes, dead_after_s: float) -> Arrival:
    """Handshake and hello. Raises LineError or ValueError; the connection is closed then."""
    line, role = accept_line(connection, secret=secret, timeout_s=HANDSHAKE_S, dead_after_s=dead_after_s)
    try:
        if role == "relay":
            return Arrival(line=line, hello=read_hello(line, HANDSHAKE_S))
        if role != "keeper":
            raise ValueError(f"{line.peer} has the role {role!r}: expected keeper or relay")
        first, *rest = line.wait(HELLO_S)
        if first.kind != KEEPER_FRAME:
            raise FrameDamaged(f"{line.peer} begins with a frame of kind {first.kind}, expected {KEEPER_FRAME}")
        return Arrival(line=line, hello=decode_hello(first.body), frames=tuple(rest))
    except BaseException:
        line.close()
        raise
