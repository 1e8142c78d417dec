"""The controller's end of all relays: opens epochs, sends plans, takes results and signs of life, and tells what broke.

    hub = RelayHub(stall_s=3.0)
    line, role = accept_line(...)                  # role "relay"
    hub.attach(read_hello(line, 5.0).node_rank, line)      # for every node
    ports = hub.open_epoch(EpochMemory(epoch=1, ...))
    hub.wait_open(5.0)
    channel = RankChannel(layout, ports.plans, ports.results, ports.vitals, watch, ...)

Keepers get the memory of their ranks with `fetch_grant` (runtime/cluster/grants.py). One thread drives a hub; nothing
happens while nobody does. Silence is counted only while the hub is looked at, by its own clock.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from runtime.cluster.attached_relay import AttachedRelay, RelayFault, RelayLost
from runtime.cluster.epoch_ports import Epoch, EpochPorts, PlanPort, RemoteInbox, RemoteVitals
from runtime.cluster.frames import HEADER_BYTES
from runtime.cluster.line import FrameDamaged, FrameLine, LineError, LineTimeout
from runtime.cluster.relay_messages import EpochMemory, RelayFrame, RelayHello, Trouble, decode, encode, result_of
from runtime.ring_errors import MessageTooLarge, ReaderDead, ReaderLagging, RingClosed
from runtime.vitals import page_size

__all__ = ["RelayFault", "RelayHub", "RelayLost", "read_hello"]

BEAT_S = 1.0  # between two signs of life to a relay
GAP_S = 0.25  # a longer gap between two looks counts as this much silence: the hub was away, too
QUIET_S = 0.5  # from then on the silence of ranks is their relay's
LEAST_FRAME_BYTES = 64 << 10


class RelayHub:
    """All relays of a deployment, by node rank."""

    def __init__(self, *, stall_s: float = 3.0) -> None:
        self._stall_s = stall_s
        self._relays: dict[int, AttachedRelay] = {}
        self._epoch: Epoch | None = None
        self._last_epoch = 0
        self.num_polls = 0
        self._looked = time.monotonic()

    @property
    def nodes(self) -> list[int]:
        """Node ranks whose relays are attached, in order."""
        return sorted(self._relays)

    def attach(self, node_rank: int, line: FrameLine) -> None:
        """Take over the line to a node's relay; it takes part from the next epoch on. One before it is detached."""
        self.detach(node_rank)
        self._relays[node_rank] = AttachedRelay(node_rank, line)

    def detach(self, node_rank: int) -> None:
        """Close the line to a relay, which then ends, and forget its fault."""
        relay = self._relays.pop(node_rank, None)
        if relay is not None:
            relay.line.close()

    def open_epoch(self, memory: EpochMemory) -> EpochPorts:
        """Have every relay make the memory of a new epoch; the one before is over.

        Raises RelayLost naming a node without a working relay; ValueError for an epoch that is not new.
        """
        if memory.epoch <= self._last_epoch:
            raise ValueError(f"epoch {memory.epoch} is not new: the last was {self._last_epoch}")
        self.poll()
        for node in memory.nodes:
            if node not in self._relays:
                raise RelayLost(f"relay of node {node}: not connected")
        self._raise_lost(memory)
        self._end_epoch()
        self._last_epoch = memory.epoch
        for node in memory.nodes:
            relay = self._relays[node]
            opening = memory.of_node(node)
            relay.line.max_frame_bytes = max(LEAST_FRAME_BYTES, memory.result_bytes + 64)
            relay.line.max_queued_bytes = 2 * memory.plan_bytes + LEAST_FRAME_BYTES
            relay.line.oldest_epoch = memory.epoch
            relay.silence_s, relay.joined = 0.0, memory.epoch
            relay.send(RelayFrame.OPEN, memory.epoch, encode(opening))
        epoch = self._epoch = Epoch(memory)
        return EpochPorts(
            epoch=memory.epoch, plans=PlanPort(self, epoch),
            results=[RemoteInbox(self, epoch, rank) for rank in range(memory.num_ranks)],
            vitals=RemoteVitals(self, epoch),
        )

    def wait_open(self, timeout_s: float) -> None:
        """Wait until every relay has made the memory. Raises RelayLost, LineTimeout naming the nodes that are late."""
        epoch = self._epoch
        assert epoch is not None, "no epoch is open"
        deadline = time.monotonic() + timeout_s
        while late := [n for n in epoch.memory.nodes if n in self._relays and self._relays[n].opened < epoch.number]:
            self._raise_lost(epoch.memory)
            left = deadline - time.monotonic()
            if left <= 0:
                raise LineTimeout(f"relays of nodes {late} have not opened epoch {epoch.number} in {timeout_s:g} s")
            self.poll(min(left, GAP_S / 2))
        self._raise_lost(epoch.memory)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in and send on whatever is there. With `timeout_s`, wait that long for something to happen."""
        self.num_polls += 1
        waiting = {relay.line.fileno(): relay for relay in self._relays.values() if relay.fault is None}
        poller = select.poll()
        for fd, relay in waiting.items():
            poller.register(fd, select.POLLIN | (select.POLLOUT if relay.line.wants_write else 0))
        for fd, _ in poller.poll(timeout_s * 1000):
            self._serve(waiting[fd])
        self._look()

    def fault(self) -> RelayFault | None:
        """The fault of a relay, until it is detached: its line is closed, silent for `stall_s` or damaged."""
        return next((relay.fault for _, relay in sorted(self._relays.items()) if relay.fault is not None), None)

    def gone(self) -> str:
        """Which relay of the open epoch is there no more, "" while all are: another may have come in its place."""
        epoch = self._epoch
        if epoch is None:
            return ""
        taking_part = {node for node, relay in self._relays.items() if relay.joined == epoch.number}
        return next((f"relay of node {node} is gone" for node in epoch.memory.nodes if node not in taking_part), "")

    def is_quiet(self, node_rank: int) -> bool:
        """Whether a relay has not been heard of lately: nothing is known of its ranks then."""
        relay = self._relays.get(node_rank)
        if relay is None or relay.fault is not None or relay.joined < self._last_epoch:
            return True
        return relay.silence_s >= QUIET_S

    def filenos(self) -> list[int]:
        """Descriptors that become readable when `poll` has something to take in."""
        return [relay.line.fileno() for relay in self._relays.values() if relay.fault is None]

    def close(self) -> None:
        """Close all lines: relays end. May be called twice."""
        self._end_epoch()
        for node_rank in self.nodes:
            self.detach(node_rank)

    def send_plans(self, epoch: Epoch, data: bytes | bytearray | memoryview, timeout_s: float) -> None:
        """A message for the plan rings of all nodes.

        Raises like RingWriter.send, and has sent nothing then, but for ReaderDead: the epoch cannot go on after that.
        """
        if epoch.is_over:
            raise RingClosed(f"plans: epoch {epoch.number} is over")
        if len(data) > epoch.memory.plan_bytes:
            raise MessageTooLarge(f"plans: a message of {len(data)} bytes, expected at most {epoch.memory.plan_bytes}")
        self._raise_dead(epoch)
        relays = [self._relays[node] for node in epoch.memory.nodes]
        self._wait_for_room(epoch, relays, HEADER_BYTES + len(data), timeout_s)
        for relay in relays:
            relay.send(RelayFrame.PLANS, epoch.number, data)
        self._raise_dead(epoch)

    def wait_for(self, happened: Callable[[], object], timeout_s: float) -> None:
        """Poll until something has happened, `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            self.poll(min(max(left, 0.0), GAP_S / 2))
            if happened() or left <= 0:
                return

    def end(self, epoch: Epoch) -> None:
        """The epoch is over: relays let go of its memory. Nothing happens if it was over."""
        if epoch is self._epoch:
            self._end_epoch()

    def _end_epoch(self) -> None:
        if self._epoch is None:
            return
        for node in self._epoch.memory.nodes:
            if node in self._relays:
                self._relays[node].send(RelayFrame.CLOSE, self._epoch.number)
        self._epoch.close()
        self._epoch = None

    def _wait_for_room(self, epoch: Epoch, relays: list[AttachedRelay], size: int, timeout_s: float) -> None:
        """Until every line can queue `size` bytes. Almost always at once: what the system takes is not queued."""
        deadline = time.monotonic() + timeout_s
        while True:
            full = [relay for relay in relays if relay.line.queued_bytes + size > relay.line.max_queued_bytes]
            if not full:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise ReaderLagging(
                    f"plans: {full[0].name} does not take its messages: {full[0].line.queued_bytes} bytes wait after "
                    f"{timeout_s:g} s"
                )
            self.poll(min(left, GAP_S / 2))
            self._raise_dead(epoch)

    def _raise_dead(self, epoch: Epoch) -> None:
        if epoch.plan_fault is not None:
            raise epoch.plan_fault
        for node in epoch.memory.nodes:
            relay = self._relays.get(node)
            if relay is None or relay.joined != epoch.number:
                raise ReaderDead(f"plans: relay of node {node} is gone")
            if relay.fault is not None:
                raise ReaderDead(f"plans: {relay.fault.text}")

    def _raise_lost(self, memory: EpochMemory) -> None:
        for node in memory.nodes:
            relay = self._relays.get(node)
            if relay is None:
                raise RelayLost(f"relay of node {node}: not connected")
            if relay.fault is not None:
                raise RelayLost(relay.fault.text)

    def _serve(self, relay: AttachedRelay) -> None:
        try:
            relay.line.flush()
            for frame in relay.line.receive():
                relay.silence_s = 0.0
                self._take(relay, frame.kind, frame.epoch, frame.body)
        except (LineError, ValueError) as error:
            relay.fail(str(error))

    def _take(self, relay: AttachedRelay, kind: int, number: int, body: bytes) -> None:
        if kind == RelayFrame.BEAT:
            return
        if number > self._last_epoch:
            raise FrameDamaged(f"speaks of epoch {number}, the last was {self._last_epoch}")
        epoch = self._epoch
        if epoch is None or number != epoch.number:
            return  # of an epoch that is over
        mine = epoch.ranks.get(relay.node_rank)
        if mine is None or relay.joined != number:
            raise FrameDamaged(f"speaks of epoch {number}, in which it has no part")
        if kind == RelayFrame.RESULT:
            rank, data = result_of(body)
            self._check_rank(rank, mine)
            epoch.results[rank].append(data)
        elif kind == RelayFrame.VITALS:
            if len(body) != page_size(len(mine)):
                raise FrameDamaged(f"sends vitals of {len(body)} bytes, expected {page_size(len(mine))}")
            epoch.write_vitals(mine, body)
        elif kind == RelayFrame.OPENED:
            relay.opened = number
        elif kind == RelayFrame.TROUBLE:
            self._trouble(relay, epoch, mine, decode(Trouble, body))
        else:
            raise FrameDamaged(f"sends a frame of kind {kind}")

    def _trouble(self, relay: AttachedRelay, epoch: Epoch, mine: list[int], trouble: Trouble) -> None:
        if trouble.error == "OSError":
            relay.fail(trouble.text)
        elif trouble.rank < 0:
            epoch.fail_plans(trouble)
        else:
            self._check_rank(trouble.rank, mine)
            epoch.fail_results(trouble)

    def _check_rank(self, rank: int, mine: list[int]) -> None:
        if rank not in mine:
            raise FrameDamaged(f"speaks for rank {rank}, its own are {mine}")

    def _look(self) -> None:
        """Count silence and send signs of life."""
        now = time.monotonic()
        gap, self._looked = min(now - self._looked, GAP_S), now
        for relay in self._relays.values():
            if relay.fault is not None:
                continue
            relay.silence_s += gap
            if relay.silence_s >= self._stall_s:
                relay.fail(f"no sign of life for {relay.silence_s:.1f} s")
            elif now - relay.beaten >= BEAT_S and not relay.line.wants_write:
                relay.beaten = now
                relay.send(RelayFrame.BEAT, 0)


def read_hello(line: FrameLine, timeout_s: float) -> RelayHello:
    """What a relay says of itself on a new line. Raises LineTimeout, FrameDamaged and other faults of lines."""
    frame = line.wait(timeout_s)[0]  # before an epoch a relay sends nothing else that matters
    if frame.kind != RelayFrame.HELLO:
        raise FrameDamaged(f"{line.peer} begins with a frame of kind {frame.kind}, expected {RelayFrame.HELLO}")
    try:
        return decode(RelayHello, frame.body)
    except ValueError as error:
        raise FrameDamaged(f"{line.peer}: {error}") from None


