"""The life of a rank process in a cluster: it stands by, and takes part in one epoch after the other.

Started by a keeper (launch/keeper.py), with its specification as JSON on standard input and one inherited socket to the
keeper. A spare is the same process that nobody has told to join yet. Weights are loaded in the first epoch and kept.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from launch.rank_main import EXIT_FAILED, EXIT_OK, EXIT_ORPHANED, die_with_parent, exit_if_orphaned
from parallel.abort import AbortSignal
from runtime.cluster.fd_passing import close_all, receive_message, send_message
from runtime.cluster.keeper_messages import FromRank, RankJoin, RankLoaded, RankStanding, decode_to_rank, encode
from runtime.cluster.line_errors import LineError
from runtime.rank_loop import Ending, RankLoop, Served
from runtime.ring import RingError, RingReader, RingWriter
from runtime.vitals import RankVitals

FIXED_DESCRIPTORS = 3  # plans, results, vitals


@dataclass(frozen=True, kw_only=True)
class ClusterRankSpec:
    """What a rank of a cluster is told at birth. `host`: where its exchanges listen. `config`: a LaunchConfig."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    parent_pid: int
    keeper_fd: int
    host: str
    secret: str  # hexadecimal
    tp: int
    threads: int
    debug: bool
    config: Mapping[str, Any]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), default=str).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ClusterRankSpec:
        return cls(**json.loads(data))


class Member(Protocol):
    """What takes part: the model and its groups, or a stand-in without either (tests/launch/fake_cluster_rank.py)."""

    @property
    def port(self) -> int:
        """Where the exchanges of other ranks find this one."""
        ...

    def join(self, join: RankJoin, segments: Mapping[str, int], vitals: RankVitals) -> Served:
        """Meet the other ranks of the epoch; load what is not there yet. `segments`: descriptors of shared memory."""
        ...

    def leave(self) -> None:
        """Let go of the others. Never raises; follows every `join`, whether or not it came to its end."""
        ...


class KeeperSocket:
    """The rank's end of the line to its keeper. A thread reads it: the rank may be inside a collective."""

    def __init__(self, sock: socket.socket, abort: AbortSignal) -> None:
        self._sock, self._abort = sock, abort
        self._joins: queue.SimpleQueue[tuple[RankJoin, list[int]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current = 0  # the epoch this rank is in, 0: none
        self._called_off = 0  # the last epoch that is known to be over
        threading.Thread(target=self._read, name="lockstep-keeper", daemon=True).start()

    def tell(self, message: FromRank) -> None:
        try:
            send_message(self._sock, encode(message))
        except LineError:
            os._exit(EXIT_ORPHANED)

    def next_join(self) -> tuple[RankJoin, list[int]]:
        """Wait for the next invitation; the descriptors are the caller's to close."""
        return self._joins.get()

    def enter(self, epoch: int) -> bool:
        """Whether the epoch still goes on: from here to `leave` the signal says when it is over."""
        with self._lock:
            if epoch <= self._called_off:
                return False
            self._current = epoch
            return True

    def leave(self) -> None:
        with self._lock:
            self._current = 0
            self._abort.clear()

    def _read(self) -> None:
        while True:
            try:
                data, fds = receive_message(self._sock)
            except LineError:
                os._exit(EXIT_ORPHANED)
            message = decode_to_rank(data)
            if isinstance(message, RankJoin):
                self._joins.put((message, fds))
            else:
                self._call_off(message.epoch)

    def _call_off(self, epoch: int) -> None:
        with self._lock:
            self._called_off = max(self._called_off, epoch)
            if 0 < self._current <= epoch:
                self._abort.set()


class RankEpochs:
    """One rank over its epochs."""

    def __init__(
        self, spec: ClusterRankSpec, member: Member, keeper: KeeperSocket, abort: AbortSignal
    ) -> None:
        self._spec, self._member, self._keeper, self._abort = spec, member, keeper, abort
        self._is_loaded = False

    def run(self) -> int:
        """Until told to stop, or until something goes wrong that is not the others' doing; the exit code."""
        left = 0
        while True:
            self._keeper.tell(RankStanding(left=left, port=self._member.port))
            join, fds = self._keeper.next_join()
            left = join.epoch
            try:
                ending = self._take_part(join, fds) if self._keeper.enter(join.epoch) else Ending.LEFT
            finally:
                close_all(fds)
                self._keeper.leave()
            if ending is not Ending.LEFT:
                return EXIT_OK if ending is Ending.STOPPED else EXIT_FAILED

    def _take_part(self, join: RankJoin, fds: Sequence[int]) -> Ending:
        assert len(fds) == FIXED_DESCRIPTORS + len(join.segments), (len(fds), join)
        plans_fd, results_fd, vitals_fd = fds[:FIXED_DESCRIPTORS]
        segments = dict(zip(join.segments, fds[FIXED_DESCRIPTORS:], strict=True))
        vitals = RankVitals(vitals_fd, join.vitals_index)
        vitals.phase(f"joining epoch {join.epoch}")
        vitals.start()
        try:
            return self._between_rings(join, plans_fd, results_fd, segments, vitals)
        finally:
            self._member.leave()
            vitals.close()

    def _between_rings(
        self, join: RankJoin, plans_fd: int, results_fd: int, segments: Mapping[str, int], vitals: RankVitals
    ) -> Ending:
        spec = self._spec
        results = RingWriter(results_fd, f"results of rank {spec.rank}", ["relay"])
        try:
            plans = RingReader(plans_fd, join.plans_index)
        except RingError:  # the relay has not lived long enough to make it
            results.close()
            return Ending.LEFT
        loop = RankLoop(
            plans, results, vitals, is_leader=spec.rank % spec.tp == 0, debug=spec.debug, called_off=self._abort,
        )
        try:
            return loop.live(lambda: self._joined(join, segments, vitals))
        finally:
            plans.close()
            results.close()

    def _joined(self, join: RankJoin, segments: Mapping[str, int], vitals: RankVitals) -> Served:
        served = self._member.join(join, segments, vitals)
        if not self._is_loaded:
            self._is_loaded = True
            self._keeper.tell(RankLoaded())
        return served


def main(make: Callable[[ClusterRankSpec, AbortSignal], Member]) -> None:
    """Be the rank that standard input describes; never returns. `make` may take its time: imports belong there."""
    die_with_parent()
    data = sys.stdin.buffer.read()
    if not data:
        os._exit(EXIT_ORPHANED)
    spec = ClusterRankSpec.from_json(data)
    exit_if_orphaned(spec.parent_pid)  # it may have ended before the first line of this function
    abort = AbortSignal()
    member = make(spec, abort)
    keeper = KeeperSocket(socket.socket(fileno=spec.keeper_fd), abort)
    code = RankEpochs(spec, member, keeper, abort).run()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: a lost connection may hold up destructors


if __name__ == "__main__":
    from launch.rank_epochs_model import make_member

    main(make_member)
