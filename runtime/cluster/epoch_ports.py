"""What the controller holds of one epoch: rings and a vitals page of other hosts, used as if they were here."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import runtime.ring_errors as errors
from runtime.cluster.relay_messages import EpochMemory, Trouble
from runtime.vitals import RankVital, Vitals, page_size

if TYPE_CHECKING:
    from runtime.cluster.relay_hub import RelayHub

_PLAN_FAULTS: dict[str, type[errors.RingError]] = {
    kind.__name__: kind
    for kind in (
        errors.ReaderDead, errors.ReaderLagging, errors.ReaderNotAttached, errors.RingClosed, errors.RingDamaged
    )
}
RECORD_BYTES = page_size(1)


class Epoch:
    """The state of an epoch that the hub and the ports share."""

    def __init__(self, memory: EpochMemory) -> None:
        self.memory, self.number = memory, memory.epoch
        self.ranks = {node: memory.ranks_of(node) for node in memory.nodes}
        self.results: list[deque[bytes]] = [deque() for _ in range(memory.num_ranks)]
        self.plan_fault: errors.RingError | None = None
        self.result_faults: dict[int, errors.RingError] = {}
        self.is_over = False
        self.page_fd = os.memfd_create("lockstep-remote-vitals", os.MFD_CLOEXEC)
        os.ftruncate(self.page_fd, page_size(memory.num_ranks))

    def write_vitals(self, ranks: Sequence[int], records: bytes) -> None:
        """Records of a node's ranks, in order."""
        for index, rank in enumerate(ranks):
            record = records[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
            os.pwrite(self.page_fd, record, rank * RECORD_BYTES)

    def fail_plans(self, trouble: Trouble) -> None:
        kind = _PLAN_FAULTS.get(trouble.error, errors.RingError)
        self.plan_fault = self.plan_fault or kind(trouble.text)

    def fail_results(self, trouble: Trouble) -> None:
        self.result_faults.setdefault(trouble.rank, errors.RingDamaged(trouble.text))

    def close(self) -> None:
        self.is_over = True
        if self.page_fd >= 0:
            os.close(self.page_fd)
            self.page_fd = -1


class PlanPort:
    """Like RingWriter: one message to every rank of every node."""

    def __init__(self, hub: RelayHub, epoch: Epoch) -> None:
        self._hub, self._epoch = hub, epoch

    def send(self, data: bytes | bytearray | memoryview, timeout_s: float) -> None:
        """Raises like RingWriter.send, with relays in the place of readers, or what a relay tells of its ring.

        RingClosed once the epoch is over, ReaderDead when a relay is gone, ReaderLagging when one takes nothing.
        """
        self._hub.send_plans(self._epoch, data, timeout_s)

    def close(self) -> None:
        """End the epoch: relays let go of its memory. May be called twice."""
        self._hub.end(self._epoch)


class RemoteInbox:
    """Like Inbox: the messages of one rank, wherever it is."""

    def __init__(self, hub: RelayHub, epoch: Epoch, rank: int) -> None:
        self._hub, self._epoch, self._rank = hub, epoch, rank
        self._looked = hub.num_polls

    def try_receive(self) -> bytes | None:
        """The next message if there is one. Raises RingDamaged for a ring that cannot be read.

        Has the hub poll only if it has not since this was last called: a look at all ranks is one look at all relays.
        """
        if self._looked == self._hub.num_polls and not self._has_something():
            self._hub.poll()
        self._looked = self._hub.num_polls
        return self._take()

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; None when none has come within `timeout_s`, or nothing can come any more."""
        if not self._has_something():
            self._hub.wait_for(self._has_something, timeout_s)
        return self._take()

    def close(self) -> None:
        """Drop what has not been read."""
        self._epoch.results[self._rank].clear()

    def _has_something(self) -> bool:
        return bool(self._epoch.results[self._rank]) or self._rank in self._epoch.result_faults

    def _take(self) -> bytes | None:
        """Messages before a fault."""
        messages = self._epoch.results[self._rank]
        if messages:
            return messages.popleft()
        if self._rank in self._epoch.result_faults:
            raise self._epoch.result_faults[self._rank]
        return None


class RemoteVitals:
    """Like Vitals: what all ranks last wrote, as it came in.

    While a relay is quiet, its ranks seem to beat and to move: what has stopped then is the relay, and the hub says so.
    """

    def __init__(self, hub: RelayHub, epoch: Epoch) -> None:
        self._hub, self._epoch = hub, epoch
        self._vitals = Vitals(epoch.page_fd, epoch.memory.num_ranks)
        self._num_reads = 0

    def read(self) -> list[RankVital]:
        """All ranks, in order. Heartbeats are on the clocks of their hosts: only a change means something."""
        self._num_reads += 1
        quiet = {node for node in self._epoch.memory.nodes if self._hub.is_quiet(node)}
        nodes = self._epoch.memory.node_of_rank
        new = -self._num_reads
        return [
            replace(vital, heartbeat_ns=new, moves=new) if nodes[vital.rank] in quiet else vital
            for vital in self._vitals.read()
        ]

    def close(self) -> None:
        """May be called twice."""
        self._vitals.close()


@dataclass(frozen=True, kw_only=True)
class EpochPorts:
    """The controller's ends of one epoch, for runtime/rank_channel.py and runtime/rank_watch.py."""

    epoch: int
    plans: PlanPort
    results: Sequence[RemoteInbox]  # one for each rank
    vitals: RemoteVitals
