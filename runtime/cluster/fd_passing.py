"""Messages with file descriptors between processes of one node, over Unix sockets that keep messages apart."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

from runtime.cluster.line_errors import FrameDamaged, FrameTooLarge, LineClosed

MAX_MESSAGE_BYTES = 128 << 10  # below what a Unix socket takes at once by default
MAX_FDS = 64  # of one message; Linux allows 253

_FD_BYTES = struct.calcsize("=i")
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid


def send_message(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message over a SOCK_SEQPACKET socket; the receiver gets descriptors of its own for `fds`.

    Raises FrameTooLarge, LineClosed; TimeoutError or BlockingIOError as the socket is set.
    """
    if not data or len(data) > MAX_MESSAGE_BYTES:  # an empty message looks like the end
        raise FrameTooLarge(f"a message of {len(data)} bytes between processes: expected 1..{MAX_MESSAGE_BYTES}")
    if len(fds) > MAX_FDS:
        raise FrameTooLarge(f"{len(fds)} descriptors in one message, expected at most {MAX_FDS}")
    try:
        if fds:
            socket.send_fds(sock, [data], list(fds))
        else:
            sock.send(data)
    except (BlockingIOError, TimeoutError):
        raise
    except OSError as error:
        raise LineClosed(f"the local socket is broken: {error.strerror or error}") from None


def receive_message(sock: socket.socket) -> tuple[bytes, list[int]]:
    """(data, descriptors) of the next message. The descriptors are the caller's to close, and not inherited.

    Raises LineClosed at the end; FrameDamaged when something was cut off; TimeoutError or BlockingIOError as the
    socket is set. No descriptor is left open then.
    """
    try:
        # socket.recv_fds of Python 3.11 drops its flags, and children would inherit what it returns.
        data, attached, flags, _ = sock.recvmsg(
            MAX_MESSAGE_BYTES, socket.CMSG_LEN(MAX_FDS * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )
    except (BlockingIOError, TimeoutError):
        raise
    except OSError as error:
        raise LineClosed(f"the local socket is broken: {error.strerror or error}") from None
    fds = _descriptors(attached)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        raise FrameDamaged(f"a local message was cut off after {len(data)} bytes and {len(fds)} descriptors")
    if not data:
        close_all(fds)
        raise LineClosed("the other process has closed the local socket")
    return data, fds


def _descriptors(attached: list[tuple[int, int, bytes]]) -> list[int]:
    fds: list[int] = []
    for level, kind, content in attached:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += memoryview(content)[: len(content) // _FD_BYTES * _FD_BYTES].cast("i")
    return fds


def close_all(fds: Sequence[int]) -> None:
    """Close every descriptor of a message that is not used."""
    for fd in fds:
        os.close(fd)


def peer_uid(sock: socket.socket) -> int:
    """The user of the process at the other end of a connected Unix socket, as the kernel knows it (Linux)."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)
