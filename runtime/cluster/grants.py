"""How a keeper gets the memory of its rank from the relay of its node: descriptors over an abstract Unix socket.

Both sides are of the same user, which the kernel vouches for. A relay answers for one epoch: requests of an older one
are refused by number, those of the next wait until the controller has opened it.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from runtime.cluster.fd_passing import close_all, peer_uid, receive_message, send_message
from runtime.cluster.line_errors import FrameDamaged, FrameStale, LineClosed, LineError, LineTimeout
from runtime.cluster.relay_messages import GrantRefusal, GrantReply, GrantRequest, decode, encode

RETRY_S = 0.05
BIND_S = 5.0  # how long a relay waits for the name: the one before it may just be ending
MAX_KEEPERS = 128
_NUM_FIXED = 3  # descriptors before those of the segments
_REPLY, _REFUSAL = b"G", b"R"


class GrantRefused(LineError):
    """The relay has no memory for this rank."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """The memory of one rank in one epoch. Descriptors belong to the holder: close them once handed on."""

    epoch: int
    plans_fd: int  # ring
    reader_index: int  # in the plan ring
    results_fd: int  # ring; the rank makes its writer, with one reader
    vitals_fd: int
    vitals_index: int  # of the rank's record on the page
    segments: Mapping[str, int]  # group name -> descriptor; names only of groups with other ranks of this node
    slot_bytes: int

    @property
    def fds(self) -> list[int]:
        return [self.plans_fd, self.results_fd, self.vitals_fd, *self.segments.values()]

    def close(self) -> None:
        """Close all descriptors; call once."""
        close_all(self.fds)


def relay_socket_name(controller: str, node_rank: int) -> str:
    """The abstract name at which the relay of a node answers; `controller` is "host:port" as all were given it."""
    digest = hashlib.sha256(f"{controller} {os.getuid()}".encode()).hexdigest()[:16]
    return f"\0lockstep-relay-{digest}-{node_rank}"


def fetch_grant(socket_name: str, *, epoch: int, rank: int, timeout_s: float) -> Grant:
    """The memory of `rank` in `epoch`; waits for the relay to come up and to open that epoch.

    Raises FrameStale when the relay is in a later epoch, GrantRefused for a rank that is not there, LineTimeout.
    """
    deadline = time.monotonic() + timeout_s
    why = "nobody listens"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return _ask(socket_name, GrantRequest(epoch=epoch, rank=rank), left)
        except (ConnectionRefusedError, TimeoutError, LineClosed) as error:  # it is starting, or has just ended
            why = str(error)
        time.sleep(min(RETRY_S, max(deadline - time.monotonic(), 0.0)))
    name = socket_name.lstrip("\0")
    raise LineTimeout(f"relay {name!r} has not granted the memory of rank {rank} in epoch {epoch}: {why}")


def _ask(socket_name: str, request: GrantRequest, timeout_s: float) -> Grant:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(timeout_s)
        sock.connect(socket_name)
        if peer_uid(sock) != os.getuid():
            raise GrantRefused(f"the relay's socket belongs to user {peer_uid(sock)}, expected {os.getuid()}")
        send_message(sock, encode(request))
        data, fds = receive_message(sock)
    try:
        return _granted(request, data, fds)
    except BaseException:
        close_all(fds)
        raise


def _granted(request: GrantRequest, data: bytes, fds: list[int]) -> Grant:
    try:
        if data[:1] == _REFUSAL:
            refusal = decode(GrantRefusal, data[1:])
            raise FrameStale(refusal.text) if refusal.is_stale else GrantRefused(refusal.text)
        reply = decode(GrantReply, data[1:])
    except ValueError as error:
        raise FrameDamaged(f"the relay's answer cannot be read: {error}") from None
    if data[:1] != _REPLY or reply.epoch != request.epoch or len(fds) != _NUM_FIXED + len(reply.segments):
        raise FrameDamaged(f"the relay answers {reply} with {len(fds)} descriptors to {request}")
    plans_fd, results_fd, vitals_fd, *rest = fds
    return Grant(
        epoch=reply.epoch, plans_fd=plans_fd, reader_index=reply.index, results_fd=results_fd, vitals_fd=vitals_fd,
        vitals_index=reply.index, segments=dict(zip(reply.segments, rest, strict=True)), slot_bytes=reply.slot_bytes,
    )


class GrantedMemory(Protocol):
    """What a relay answers from (runtime/cluster/node_memory.py)."""

    epoch: int

    def grant(self, rank: int) -> tuple[GrantReply, list[int]]:
        """The reply and the descriptors that go with it. Raises ValueError for a rank of another node."""
        ...


class GrantServer:
    """The relay's end. `fileno` is for select; `handle` answers what can be answered and never waits."""

    def __init__(self, socket_name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = _bound(socket_name)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waiting: dict[socket.socket, GrantRequest | None] = {}  # None: not asked yet

    def fileno(self) -> int:
        return self._selector.fileno()

    def handle(self, memory: GrantedMemory | None, epoch: int) -> None:
        """`epoch` is the last one opened; `memory` is None when that is over."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._read(key.fileobj)
        for sock, request in list(self._waiting.items()):
            if request is not None:
                self._answer(sock, request, memory, epoch)

    def close(self) -> None:
        for sock in list(self._waiting):
            self._drop(sock)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        sock.setblocking(False)
        if peer_uid(sock) != os.getuid() or len(self._waiting) >= MAX_KEEPERS:
            sock.close()
            return
        self._waiting[sock] = None
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, sock: socket.socket) -> None:
        """A request; anything else ends the connection."""
        try:
            data, fds = receive_message(sock)
            close_all(fds)
            if self._waiting[sock] is not None:
                raise ValueError("a second request")
            self._waiting[sock] = decode(GrantRequest, data)
        except BlockingIOError:
            return
        except (LineError, ValueError):
            self._drop(sock)

    def _answer(
        self, sock: socket.socket, request: GrantRequest, memory: GrantedMemory | None, epoch: int
    ) -> None:
        if request.epoch > epoch:
            return  # to be opened
        try:
            if request.epoch < epoch or memory is None:
                text = f"epoch {request.epoch} of rank {request.rank} is over: the relay is at epoch {epoch}"
                refusal = GrantRefusal(epoch=epoch, is_stale=True, text=text)
                send_message(sock, _REFUSAL + encode(refusal))
            else:
                self._grant(sock, request, memory)
        except (LineError, OSError):
            pass  # the keeper has gone, or will ask again
        self._drop(sock)

    def _grant(self, sock: socket.socket, request: GrantRequest, memory: GrantedMemory) -> None:
        try:
            reply, fds = memory.grant(request.rank)
        except ValueError as error:
            refusal = GrantRefusal(epoch=memory.epoch, is_stale=False, text=str(error))
            send_message(sock, _REFUSAL + encode(refusal))
        else:
            send_message(sock, _REPLY + encode(reply), fds)

    def _drop(self, sock: socket.socket) -> None:
        self._waiting.pop(sock, None)
        self._selector.unregister(sock)
        sock.close()


def _bound(socket_name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + BIND_S
    while True:
        try:
            listener.bind(socket_name)
        except OSError as error:
            if time.monotonic() > deadline:
                listener.close()
                raise LineTimeout(f"another relay holds {socket_name!r}: {error.strerror}") from None
            time.sleep(RETRY_S)
            continue
        listener.listen(MAX_KEEPERS)
        listener.setblocking(False)
        return listener
