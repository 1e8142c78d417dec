"""Ranks of several hosts as threads: each with a listener on loopback, its host's segments and an abort signal."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from parallel.abort import AbortSignal
from parallel.layout import Layout, RankGroups
from parallel.shm_group import segment_size
from parallel.socket_group import ExchangeListener, build_host_groups, close_groups
from runtime.futex import best_sleeper

T = TypeVar("T")
SLOT_BYTES = 1 << 16
SECRET = b"only for tests"
TIMEOUT_S, PROCESS_TIMEOUT_S = 30.0, 120.0


@dataclass
class Hosts:
    """`node_of_rank` says which host a rank is on; one epoch's memory for each `groups` call."""

    layout: Layout
    node_of_rank: Sequence[int]
    listeners: list[ExchangeListener]
    aborts: list[AbortSignal]
    stack: ExitStack
    segments: list[dict[str, int]]

    def new_segments(self, slot_bytes: int) -> None:
        """Zeroed memory for the next epoch."""
        made: dict[tuple[str, int, int], int] = {}
        self.segments = []
        for rank in range(self.layout.ep):
            own: dict[str, int] = {}
            for name, dp in (("tp", self.layout.dp_rank(rank)), ("ep", 0)):
                here = [r for r in range(self.layout.ep) if self.node_of_rank[r] == self.node_of_rank[rank]]
                peers = [r for r in here if name == "ep" or self.layout.dp_rank(r) == dp]
                key = (name, self.node_of_rank[rank], dp)
                if len(peers) > 1 and key not in made:
                    made[key] = os.memfd_create("lockstep-test")
                    self.stack.callback(os.close, made[key])
                    os.ftruncate(made[key], segment_size(len(peers), slot_bytes))
                if len(peers) > 1:
                    own[name] = made[key]
            self.segments.append(own)

    def groups(self, rank: int, slot_bytes: int = SLOT_BYTES, **changes: Any) -> RankGroups:
        """What `rank` gets; `changes` are other arguments than the right ones."""
        given: dict[str, Any] = {
            "epoch": 1, "addresses": [(each.host, each.port) for each in self.listeners],
            "node_of_rank": self.node_of_rank, "segments": self.segments[rank], "slot_bytes": slot_bytes,
            "listener": self.listeners[rank], "secret": SECRET, "sleeper": best_sleeper(),
            "abort": self.aborts[rank], "timeout_s": TIMEOUT_S,
        }
        return build_host_groups(self.layout, rank, **{**given, **changes})

    def run(self, work: Callable[[int, RankGroups], T], **changes: Any) -> list[T]:
        """`work` on a thread for each rank, connected; whoever fails calls all others off, and is told first."""
        failures: list[BaseException] = []
        lock = threading.Lock()

        def one(rank: int) -> T:
            try:
                groups = self.groups(rank, **changes)
                try:
                    with torch.inference_mode():
                        return work(rank, groups)
                finally:
                    close_groups(groups)
            except BaseException as error:
                with lock:
                    failures.append(error)
                for abort in self.aborts:
                    abort.set()
                raise

        with ThreadPoolExecutor(self.layout.ep) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.layout.ep)]
        if failures:
            raise failures[0]
        return [future.result() for future in futures]


@contextmanager
def hosts(layout: Layout, node_of_rank: Sequence[int], slot_bytes: int = SLOT_BYTES) -> Iterator[Hosts]:
    with ExitStack() as stack:
        listeners = [ExchangeListener("127.0.0.1") for _ in range(layout.ep)]
        aborts = [AbortSignal() for _ in range(layout.ep)]
        for listener, abort in zip(listeners, aborts, strict=True):
            stack.callback(listener.close)
            stack.callback(abort.close)
        made = Hosts(layout, node_of_rank, listeners, aborts, stack, [])
        made.new_segments(slot_bytes)
        yield made


def meet_as_process(
    layout: Layout, rank: int, folder: Path, listener: ExchangeListener, abort: AbortSignal, epoch: int
) -> RankGroups:
    """Groups of a process that is the only rank of its host; the others are found through files."""
    put(folder / f"port{rank}", str(listener.port))
    ports = [int(get(folder / f"port{peer}")) for peer in range(layout.ep)]
    return build_host_groups(
        layout, rank, epoch=epoch, addresses=[(listener.host, port) for port in ports], node_of_rank=range(layout.ep),
        segments={}, slot_bytes=0, listener=listener, secret=SECRET, sleeper=best_sleeper(), abort=abort,
    )


def put(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def get(path: Path) -> str:
    deadline = time.monotonic() + PROCESS_TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.005)
    return path.read_text()
