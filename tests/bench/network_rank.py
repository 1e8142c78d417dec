"""The rank process in a network namespace of its own, over sockets or gloo; its compute may be replaced by waits.

    python tests/bench/network_overlap.py ... starts it.

Plans and results go through shared memory as on one machine: only exchanges between ranks cross the network. With
waits, attention, experts, shared experts and dense MLPs give zeros after as long as LOCKSTEP_BENCH_WAITS says: cores
are then no bottleneck, and half the tokens take half the time.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from launch.rank_main import RankSpec, main
from runtime.rank_loop import Served
from runtime.vitals import RankVitals

FOLDER, EXCHANGE, WAITS = "LOCKSTEP_BENCH_FOLDER", "LOCKSTEP_BENCH_EXCHANGE", "LOCKSTEP_BENCH_WAITS"
CLONE_NEWNET = 0x40000000
SPIN_S = 1e-4  # a sleep ends late by about this much


def build(spec: RankSpec, vitals: RankVitals) -> Served:
    enter_namespace(f"lk{spec.rank}")
    from parallel.layout import Layout, RankGroups, with_ledger
    from parallel.ledger import Ledger
    from runtime.config import EngineConfig
    from runtime.rank import Rank
    from runtime.served_rank import ServedRank
    from runtime.watched_group import watch_groups

    config = EngineConfig(**{**spec.config, "model": Path(spec.config["model"])})
    layout, folder = config.layout, Path(os.environ[FOLDER])
    make: Callable[[Layout, int, Path], RankGroups] = {"sockets": over_sockets, "gloo": over_gloo}[os.environ[EXCHANGE]]
    groups = watch_groups(make(layout, spec.rank, folder), vitals)
    if config.debug:
        groups = with_ledger(groups, Ledger())
    waits = json.loads(os.environ[WAITS])
    if waits:
        replace_compute(waits)
    return ServedRank(Rank.load(config, groups, phase=vitals.phase), spec.dp_rank)


def enter_namespace(name: str) -> None:
    """Of this thread, and of those that it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")
    os.close(fd)


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def over_sockets(layout: Any, rank: int, folder: Path) -> Any:
    from parallel.abort import AbortSignal
    from parallel.socket_group import ExchangeListener, build_host_groups
    from runtime.futex import best_sleeper

    listener = ExchangeListener(address(rank))
    unfinished = folder / f"{rank}.new"
    unfinished.write_text(str(listener.port))
    unfinished.rename(folder / f"port{rank}")
    addresses = [(address(peer), int(appeared(folder / f"port{peer}"))) for peer in range(layout.ep)]
    return build_host_groups(
        layout, rank, epoch=1, addresses=addresses, node_of_rank=range(layout.ep), segments={}, slot_bytes=0,
        listener=listener, secret=b"bench", sleeper=best_sleeper(), abort=AbortSignal(),
    )


def over_gloo(layout: Any, rank: int, folder: Path) -> Any:
    import torch.distributed as dist

    from parallel.layout import build_groups

    os.environ["GLOO_SOCKET_IFNAME"] = "lk"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=layout.ep, timeout=timedelta(seconds=60)
    )
    return build_groups(layout, "cpu")


def appeared(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
    return path.read_text()


def pause(seconds: float) -> None:
    """Wait without using a core."""
    until = time.perf_counter() + seconds
    if seconds > SPIN_S:
        time.sleep(seconds - SPIN_S)
    while time.perf_counter() < until:
        os.sched_yield()


def replace_compute(us_per_token: dict[str, float]) -> None:
    """Have the parts of every layer of this process wait, for each token that they would work on."""
    from moe.experts import GatedMlp
    from moe.layer import MoeLayer, MoeState
    from runtime.attention.mla import MlaAttention

    def waiting(part: str) -> Callable[..., Tensor]:
        us = us_per_token[part]

        def wait(_self: object, hidden: Tensor, *_: object) -> Tensor:
            pause(1e-6 * us * hidden.shape[0])
            return hidden.new_zeros(hidden.shape)

        return wait

    experts = waiting("experts")

    def run_experts(self: Any, state: MoeState) -> None:
        received = self._dispatcher.dispatch_recv(state.handle).hidden
        experts(self, state.hidden)  # by this rank's own tokens: routing must not make one rank wait for another
        state.output = received.new_zeros(received.shape)

    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (MlaAttention, "__call__", waiting("attention")), (GatedMlp, "__call__", waiting("shared")),
        (MoeLayer, "run_experts", run_experts),
    ]
    for owner, method, replacement in replacements:
        setattr(owner, method, replacement)


if __name__ == "__main__":
    main(build)
