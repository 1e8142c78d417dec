"""Where the other ranks reach this one; kept over many epochs."""

from __future__ import annotations

import socket


class ExchangeListener:
    """A listening socket on `host` (an address of this machine), on a free port."""

    def __init__(self, host: str) -> None:
        self.socket = socket.create_server((host, 0), backlog=256)
        self.host, self.port = self.socket.getsockname()[:2]

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()
