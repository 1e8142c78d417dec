"""What the hub knows of one relay: its line, how far it is, how long it has been silent, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.cluster.line import FrameLine, LineError
from runtime.cluster.relay_messages import RelayFrame


class RelayLost(LineError):
    """The relay of a node is not there, and nothing can go on without it."""


@dataclass(frozen=True, kw_only=True)
class RelayFault:
    """Why the relay of a node must be replaced, in one line that names the node."""

    node_rank: int
    text: str


class AttachedRelay:
    """One attached relay."""

    def __init__(self, node_rank: int, line: FrameLine) -> None:
        self.node_rank, self.line = node_rank, line
        self.joined = 0  # the last epoch that it was told to open
        self.opened = 0  # the last one whose memory it has made
        self.silence_s = 0.0
        self.beaten = 0.0  # when it was last sent a sign of life
        self.fault: RelayFault | None = None

    @property
    def name(self) -> str:
        return f"relay of node {self.node_rank}"

    def fail(self, text: str) -> None:
        """The first fault counts."""
        self.fault = self.fault or RelayFault(node_rank=self.node_rank, text=f"{self.name}: {text}")

    def send(self, kind: int, epoch: int, body: bytes | bytearray | memoryview = b"") -> None:
        """A line that is gone becomes the relay's fault."""
        try:
            self.line.send(kind, epoch, body, limited=kind == RelayFrame.PLANS)
        except LineError as error:
            self.fail(str(error))
