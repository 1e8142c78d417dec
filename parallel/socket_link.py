"""One ordered stream to one other rank of a group: messages leave when they are given, and are received into place.

A message starts with a header that names the call, its operation and its bytes, so that ranks which fall out of step
are told at once. What the kernel does not take is sent, and what it could not hold is received, by a `Mover`.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from parallel.exchange_errors import ExchangeError, OutOfStep, PeerLost
from parallel.shm_group import OPERATIONS
from parallel.socket_mover import Mover

HEADER = struct.Struct("<IIQQ")  # magic, operation, number of the call, bytes of data
MAGIC = 0x4C4B5831
BUFFER_BYTES = 4 << 20  # asked of the kernel for each direction; it grants what net.core.{r,w}mem_max allow
LARGE_SHARE = 8  # messages awaited of more than this part of the receive buffer: the kernel might not hold them
_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS, linux/tcp.h from 6.15 on


def tune(sock: socket.socket) -> None:
    """Before a socket listens or connects: nothing waits to be sent in fewer packets, and large buffers."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    try:  # after a stall of the network, seconds must not pass until the next attempt
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)
    except OSError:
        return  # an older kernel


@dataclass(slots=True)
class _Awaited:
    call: int
    operation: int
    into: memoryview  # of bytes, as many as the message must have
    is_exact: bool = True  # else it may have fewer, and `into` is cut when its header tells how many
    header: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    got: int = 0  # of header and data
    likely: int = 0  # bytes that the message will have

    def rest(self) -> list[memoryview]:
        missing = HEADER.size - self.got
        if missing <= 0:
            return [self.into[-missing:]]
        header = memoryview(self.header)[self.got :]
        return [header, self.into] if self.is_exact else [header]  # not what belongs to the next message


class Link:
    """The stream between rank `own` and rank `peer` of `group`; `sock` is connected, and closed with the link.

    Calls are numbered alike on both ends and given in order. One thread sends, awaits and receives; the mover helps.
    """

    def __init__(self, sock: socket.socket, *, group: str, own: int, peer: int, mover: Mover) -> None:
        sock.setblocking(False)
        self.peer = peer
        self._sock, self._group, self._own, self._mover = sock, group, own, mover
        self._large = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // LARGE_SHARE
        self._out, self._in = threading.Lock(), threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._awaited: deque[_Awaited] = deque()
        self._awaited_bytes = 0
        self._last_bytes = 0  # of the last message whose size was not known: layers of a step are alike
        self._attended = False  # its own thread receives: the mover keeps its hands off
        self._send_fault: ExchangeError | None = None  # the mover's: what has come before it still counts
        self._receive_fault: ExchangeError | None = None

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, call: int, operation: int, data: memoryview) -> None:
        """Have a message under way; `data` may change afterwards. Raises PeerLost."""
        parts = [memoryview(HEADER.pack(MAGIC, operation, call, len(data))), data]
        with self._out:
            sent = 0 if self._unsent else self._write(parts)
            if sent == HEADER.size + len(data):
                return
            # The caller is to go on: it keeps no data for us.
            self._unsent.append(memoryview(b"".join(parts))[sent:])
            self._mover.send(self)

    def send_on(self) -> None:
        """For the mover, when the socket takes more: what `send` has left behind."""
        with self._out:
            try:
                while self._unsent:
                    sent = self._write([self._unsent[0]])
                    if sent < len(self._unsent[0]):
                        self._unsent[0] = self._unsent[0][sent:]
                        return
                    self._unsent.popleft()
            except ExchangeError as error:
                self._send_fault = error
                self._unsent.clear()
            self._mover.sent(self)

    def expect(self, call: int, operation: int, into: memoryview) -> None:
        """The message of `call` goes to `into`, bytes of exactly its size."""
        self._expect(_Awaited(call, operation, into, likely=len(into)))

    def expect_most(self, call: int, operation: int, into: memoryview) -> Callable[[], int]:
        """The same for a message of as many bytes at most. Gives what tells how many they were, once it is complete."""
        awaited = _Awaited(call, operation, into, is_exact=False, likely=min(self._last_bytes, len(into)))
        self._expect(awaited)
        return lambda: len(awaited.into)

    def _expect(self, awaited: _Awaited) -> None:
        with self._in:
            self._awaited.append(awaited)
            self._awaited_bytes += awaited.likely
            if self._awaited_bytes > self._large and not self._attended:
                self._mover.receive(self)

    def receive(self, call: int) -> bool:
        """Take in what has come; True once the message of `call` is complete. Raises PeerLost or OutOfStep."""
        with self._in:
            while self._awaited and self._awaited[0].call <= call:
                if self._receive_fault is not None:
                    raise self._receive_fault
                if not self._read():
                    if self._send_fault is not None:
                        raise self._send_fault
                    return False
            return True

    def receive_on(self) -> None:
        """For the mover, when something has come: into place with it, as far as it is expected."""
        with self._in:
            try:
                more = bool(self._awaited) and not self._attended and self._receive_fault is None
                while more and self._read():
                    more = bool(self._awaited)
            except ExchangeError as error:
                self._receive_fault, more = error, False
            if not more:
                self._mover.received(self)

    def attend(self, attended: bool) -> None:
        """Whether the thread that owns the link stands by to receive."""
        with self._in:
            self._attended = attended
            if attended:
                self._mover.received(self)
            elif self._awaited_bytes > self._large:
                self._mover.receive(self)

    def close(self) -> None:
        """No more of this stream; the other end is told. The mover must have ended."""
        self._sock.close()

    def _write(self, parts: Sequence[memoryview]) -> int:
        try:
            return self._sock.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from None

    def _read(self) -> bool:
        """Read on in the first message awaited; False where the socket has no more."""
        first = self._awaited[0]
        while first.got < HEADER.size + len(first.into):
            try:
                received = self._sock.recvmsg_into(first.rest())[0]
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._lost(error) from None
            if received == 0:
                raise self._lost("closed the connection")
            unchecked = first.got < HEADER.size
            first.got += received
            if unchecked and first.got >= HEADER.size:
                self._check(first)
        self._awaited.popleft()
        self._awaited_bytes -= first.likely
        if not first.is_exact:
            self._last_bytes = len(first.into)
        return True

    def _check(self, awaited: _Awaited) -> None:
        magic, operation, call, num_bytes = HEADER.unpack(awaited.header)
        expected = len(awaited.into)
        fits = num_bytes == expected or (num_bytes < expected and not awaited.is_exact)
        if (magic, operation, call) == (MAGIC, awaited.operation, awaited.call) and fits:
            awaited.into = awaited.into[:num_bytes]
            return
        where = f"{self._group}: rank {self.peer}"
        if magic != MAGIC or operation >= len(OPERATIONS):
            raise OutOfStep(f"{where} sent something that is no message")
        raise OutOfStep(
            f"{where} made call {call}, {OPERATIONS[operation]}, with {num_bytes} bytes; "
            f"rank {self._own} call {awaited.call}, {OPERATIONS[awaited.operation]}, with {len(awaited.into)}"
        )

    def _lost(self, why: object) -> PeerLost:
        return PeerLost(f"{self._group}: rank {self.peer} is lost: {why}")
