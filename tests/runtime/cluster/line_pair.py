"""Two ends of a line in one process, for tests; and one end whose other is a bare socket that says what it likes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from runtime.cluster.line import FrameLine, accept_line, connect_line

SECRET = b"a secret for tests"
SOON_S = 5.0


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A listener on a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON_S)
        yield listener


@contextmanager
def line_pair(role: str = "keeper") -> Iterator[tuple[FrameLine, FrameLine]]:
    """(accepted, connected) lines over TCP, handshake done."""
    with ExitStack() as stack:
        listener = stack.enter_context(listening())
        pool = stack.enter_context(ThreadPoolExecutor(1))
        host, port = listener.getsockname()
        connecting = pool.submit(connect_line, host, port, secret=SECRET, role=role, timeout_s=SOON_S)
        accepted, _ = accept_line(listener.accept()[0], secret=SECRET, timeout_s=SOON_S)
        stack.callback(accepted.close)
        connected = connecting.result()
        stack.callback(connected.close)
        yield accepted, connected


@contextmanager
def bare_peer() -> Iterator[tuple[FrameLine, socket.socket]]:
    """(line, socket that may write any bytes into it)."""
    ours, theirs = socket.socketpair()
    line = FrameLine(ours, "keeper at nowhere")
    with theirs:
        try:
            yield line, theirs
        finally:
            line.close()
