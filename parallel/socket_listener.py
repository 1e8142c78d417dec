"""Where the other ranks reach this one; kept over many epochs."""

from __future__ import annotations

import socket

from parallel.socket_link import tune


class ExchangeListener:
    """A listening socket on `host` (an address of this machine), on a free port.

    `early` holds connections of ranks that were in a later epoch already when this one was still in an earlier.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            tune(self._socket)  # what is accepted inherits it
            self._socket.bind((host, 0))
            self._socket.listen(512)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self.host: str = host
        self.port: int = self._socket.getsockname()[1]
        self.early: list[tuple[bytes, socket.socket]] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """The next connection, None when there is none."""
        try:
            return self._socket.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return None

    def close(self) -> None:
        self._socket.close()
        for _, sock in self.early:
            sock.close()
        self.early.clear()
