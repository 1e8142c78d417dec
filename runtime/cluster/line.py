"""One TCP line between two processes of a deployment: checked frames, nothing that blocks, nothing without a bound."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque

from runtime.cluster.frames import HEADER_BYTES, MAX_FRAME_BYTES, Frame, FrameDecoder, encode_header
from runtime.cluster.handshake import accept_handshake, offer_handshake
from runtime.cluster.line_errors import (
    AuthenticationFailed,
    FrameDamaged,
    FrameLost,
    FrameRepeated,
    FrameStale,
    FrameTooLarge,
    LineClosed,
    LineCongested,
    LineError,
    LineTimeout,
    VersionRefused,
)

__all__ = [
    "AuthenticationFailed",
    "Frame",
    "FrameDamaged",
    "FrameLine",
    "FrameLost",
    "FrameRepeated",
    "FrameStale",
    "FrameTooLarge",
    "LineClosed",
    "LineCongested",
    "LineError",
    "LineTimeout",
    "VersionRefused",
    "accept_line",
    "connect_line",
]

MAX_QUEUED_BYTES = 16 << 20  # a frame is taken in spite of it when nothing else is queued
DEAD_AFTER_S = 20.0  # how long the system tries to reach a peer that does not answer, idle or not
_CHUNK_BYTES = 256 << 10
_MAX_CHUNKS = 16  # read in one call: a peer that never stops must not keep the caller
_RETRY_S = 0.1


class FrameLine:
    """One end of a line. Any thread may send; one thread receives.

    A fault ends the line: everything decoded before it is still returned, then every call raises it.
    """

    def __init__(
        self, sock: socket.socket, peer: str,
        *, max_frame_bytes: int = MAX_FRAME_BYTES, max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.max_queued_bytes = max_queued_bytes
        self.oldest_epoch = 0  # older frames are dropped and counted, but for those of no epoch
        self.num_stale = 0
        self._sock = sock
        self._decoder = FrameDecoder(peer, max_frame_bytes)
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._sequence = 0  # of the last frame sent
        self._fault: LineError | None = None
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For select and poll; -1 once closed."""
        return self._sock.fileno()

    @property
    def max_frame_bytes(self) -> int:
        """The longest body that is taken from the peer."""
        return self._decoder.max_frame_bytes

    @max_frame_bytes.setter
    def max_frame_bytes(self, value: int) -> None:
        self._decoder.max_frame_bytes = value

    @property
    def queued_bytes(self) -> int:
        """Bytes that the system has not taken yet."""
        return self._queued_bytes

    @property
    def wants_write(self) -> bool:
        """Whether `flush` has something to do."""
        return self._queued_bytes > 0

    def send(
        self, kind: int, epoch: int, body: bytes | bytearray | memoryview, *, limited: bool = True
    ) -> None:
        """Send a frame: at once as far as the system takes it, the rest is queued for `flush`.

        Raises LineCongested (nothing was sent) when more than `max_queued_bytes` would wait, unless `limited` is false:
        for the few small frames that end or begin something. Raises LineClosed.
        """
        with self._lock:
            self._raise_fault()
            content = memoryview(body).cast("B")
            size = HEADER_BYTES + len(content)
            if limited and self._queued_bytes and self._queued_bytes + size > self.max_queued_bytes:
                raise LineCongested(
                    f"{self.peer} does not take its frames: {self._queued_bytes} bytes wait, {size} more would be over "
                    f"the limit of {self.max_queued_bytes}"
                )
            self._sequence += 1
            pieces = [memoryview(encode_header(kind, epoch, self._sequence, content)), content]
            taken = self._write(pieces) if not self._queue else 0
            for piece in pieces:
                if taken < len(piece):
                    self._queue.append(memoryview(bytes(piece[taken:])))  # a copy: `body` is the caller's again
                    self._queued_bytes += len(piece) - taken
                taken = max(taken - len(piece), 0)

    def flush(self) -> bool:
        """Write what is queued as far as the system takes it; True when nothing is left. Raises LineClosed."""
        with self._lock:
            while self._queue:
                self._raise_fault()
                taken = self._write(list(self._queue)[:16])
                if not taken:
                    return False
                self._queued_bytes -= taken
                while self._queue and taken >= len(self._queue[0]):
                    taken -= len(self._queue.popleft())
                if taken:
                    self._queue[0] = self._queue[0][taken:]
            return True

    def receive(self) -> list[Frame]:
        """All frames that are here, perhaps none; never waits. Raises any LineError but LineTimeout."""
        if self._decoder.fault is not None:
            raise self._decoder.fault
        frames: list[Frame] = []  # reads even when a send has failed: what the peer said last may still be here
        for _ in range(_MAX_CHUNKS):
            count = self._read()
            if count is None:
                break
            frames += self._decoder.feed(self._chunk[:count])
            if self._decoder.fault is not None or count < len(self._chunk):
                break
        if self._fault is not None and not frames:
            raise self._fault
        return self._fenced(frames)

    def wait(self, timeout_s: float) -> list[Frame]:
        """At least one frame; flushes meanwhile. Raises LineTimeout when none has come within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not (frames := self.receive()):
            left = deadline - time.monotonic()
            if left <= 0:
                raise LineTimeout(f"{self.peer}: nothing came within {timeout_s:g} s")
            self.flush()
            poll = select.poll()
            poll.register(self._sock, select.POLLIN | (select.POLLOUT if self.wants_write else 0))
            poll.poll(left * 1000 + 1)
        return frames

    def close(self) -> None:
        """May be called twice. What is queued is lost: flush first where it matters."""
        with self._lock:
            self._fault = self._fault or LineClosed(f"the line to {self.peer} is closed at this end")
            self._sock.close()

    def _write(self, pieces: list[memoryview]) -> int:
        """Bytes taken by the system, 0 when it takes none now."""
        try:
            return self._sock.sendmsg(pieces)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._fault = LineClosed(f"the line to {self.peer} is broken: {error.strerror or error}")
            raise self._fault from None

    def _read(self) -> int | None:
        """Bytes put into the chunk; None when there are none now, or the line has ended."""
        try:
            count = self._sock.recv_into(self._chunk)
        except BlockingIOError:
            return None
        except OSError as error:
            self._fault = self._fault or LineClosed(f"the line to {self.peer} is broken: {error.strerror or error}")
            return None
        if count == 0:
            where = f" within a frame, {self._decoder.num_pending} bytes of it" if self._decoder.num_pending else ""
            self._fault = self._fault or LineClosed(f"{self.peer} has closed the line{where}")
            return None
        return count

    def _fenced(self, frames: list[Frame]) -> list[Frame]:
        kept = [frame for frame in frames if not 0 < frame.epoch < self.oldest_epoch]
        self.num_stale += len(frames) - len(kept)
        return kept

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault


def connect_line(
    host: str, port: int, *, secret: bytes, role: str, timeout_s: float, dead_after_s: float = DEAD_AFTER_S
) -> FrameLine:
    """A line to whoever listens at `host`:`port` and knows `secret`; tries again until `timeout_s` while nobody does.

    Raises LineTimeout, AuthenticationFailed, VersionRefused, LineClosed; ValueError for a host that has no address.
    """
    deadline = time.monotonic() + timeout_s
    sock = _connected(host, port, deadline, timeout_s)
    peer = f"controller at {host}:{port}"
    try:
        _watch_over(sock, dead_after_s)
        offer_handshake(sock, secret, role, peer, deadline)
        return FrameLine(sock, peer)
    except BaseException:
        sock.close()
        raise


def accept_line(
    sock: socket.socket, *, secret: bytes, timeout_s: float, dead_after_s: float = DEAD_AFTER_S
) -> tuple[FrameLine, str]:
    """(line, role of the peer) over a connection just accepted; `sock` is closed when it does not become a line.

    Raises LineTimeout, AuthenticationFailed, VersionRefused, LineClosed.
    """
    try:
        peer = _address(sock)
        _watch_over(sock, dead_after_s)
        role = accept_handshake(sock, secret, peer, time.monotonic() + timeout_s)
        return FrameLine(sock, f"{role} at {peer}"), role
    except BaseException:
        sock.close()
        raise


def _connected(host: str, port: int, deadline: float, timeout_s: float) -> socket.socket:
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(left, 0.001))
        except socket.gaierror as error:
            raise ValueError(f"controller address {host!r}: {error.strerror}") from None
        except OSError as error:
            if deadline - time.monotonic() <= _RETRY_S:
                why = error.strerror or error
                raise LineTimeout(f"nobody answers at {host}:{port} within {timeout_s:g} s: {why}") from None
        time.sleep(_RETRY_S)


def _watch_over(sock: socket.socket, dead_after_s: float) -> None:
    """Have the system give up a peer that has not answered for `dead_after_s`, also while nothing is sent."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    every = max(1, int(dead_after_s / 4))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(AttributeError):  # options of Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(dead_after_s * 1000))


def _address(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError as error:
        raise LineClosed(f"a peer has closed its connection at once: {error.strerror or error}") from None
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a local socket"
