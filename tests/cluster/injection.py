"""What goes wrong: one function a kind of fault, each of which strikes something at random and says what."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

from launch.local_cluster import LocalCluster
from tests.cluster.processes import is_running, keeper_of, rank_of, relay_of

FIND_S = 10.0  # how long a target may be away, because the fault before has taken it
PAUSE_S = 1.0  # a hiccup that must not restart anything
STOP_S = 4.0  # longer than a stall may last, of somebody whom nobody waits for
CUT_S = 6.0  # longer than a stall may last
LAUNCHER_S = 0.5  # how long a launcher takes to start a worker again


@dataclass(kw_only=True)
class Site:
    """A running cluster. `folder`: where ranks look for orders to raise; `network`: takes commands, one a line."""

    cluster: LocalCluster
    rng: random.Random
    folder: Path
    network: TextIO | None = None
    healing: list[threading.Thread] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        return len(self.cluster.workers)

    def find(self, what: str, look: Callable[[int], int | None], ranks: list[int]) -> tuple[int, int]:
        """(rank, pid) of a process that a worker has, of a rank drawn from `ranks`."""
        until = time.monotonic() + FIND_S
        while time.monotonic() < until:
            rank = self.rng.choice(ranks)
            worker = self.cluster.workers[rank]
            keeper = keeper_of(worker.pid) if worker.poll() is None else None
            pid = look(keeper) if keeper is not None else None
            if pid is not None:
                return rank, pid
            time.sleep(0.02)
        raise RuntimeError(f"no {what} is there to be struck")

    def leaders(self) -> list[int]:
        """The rank of each node whose keeper has the relay."""
        nodes = [self.cluster.node_of(rank) for rank in range(self.num_ranks)]
        return [nodes.index(node) for node in sorted(set(nodes))]

    def say(self, command: str) -> None:
        assert self.network is not None, "this fault needs --network"
        self.network.write(command + "\n")
        self.network.flush()

    def later(self, seconds: float, heal: Callable[[], None]) -> None:
        """Mend something in a while, beside what goes on."""

        def run() -> None:
            time.sleep(seconds)
            heal()

        thread = threading.Thread(target=run, daemon=True)
        self.healing.append(thread)
        thread.start()

    def wait_healed(self) -> None:
        while self.healing:
            self.healing.pop().join()


Strike = Callable[[Site], str]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`restarts`: whether ranks must form anew; else nothing may be restarted. `lasts_s`: before it is mended."""

    strike: Strike
    restarts: bool = True
    lasts_s: float = 0.0
    needs_network: bool = False


def _signal_rank(number: signal.Signals, then: signal.Signals | None = None) -> Strike:
    def strike(site: Site) -> str:
        rank, pid = site.find("rank", rank_of, list(range(site.num_ranks)))
        os.kill(pid, number)
        if then is not None:
            site.later(PAUSE_S, lambda: _kill(pid, then))
        return f"rank {rank} (process {pid})"

    return strike


def _signal_relay(number: signal.Signals) -> Strike:
    def strike(site: Site) -> str:
        rank, pid = site.find("relay", relay_of, site.leaders())
        os.kill(pid, number)
        return f"relay of node {site.cluster.node_of(rank)} (process {pid})"

    return strike


def _signal_keeper(number: signal.Signals, after_s: float) -> Strike:
    """The launcher kills what is left of the worker and starts it again."""

    def strike(site: Site) -> str:
        rank, pid = site.find("keeper", lambda keeper: keeper, list(range(site.num_ranks)))
        os.kill(pid, number)

        def restart() -> None:
            _kill(pid, signal.SIGKILL)
            site.cluster.workers[rank].wait()
            site.cluster.start(rank)

        site.later(after_s, restart)
        return f"keeper of rank {rank} (process {pid})"

    return strike


def _kill_launcher(site: Site) -> str:
    """The shell that has started a worker; the worker ends by itself, and the node's launcher comes again."""
    rank = site.rng.randrange(site.num_ranks)
    launcher = site.cluster.workers[rank]
    keeper = keeper_of(launcher.pid)
    launcher.kill()

    def restart() -> None:
        launcher.wait()
        while keeper is not None and is_running(keeper):
            time.sleep(0.02)
        site.cluster.start(rank)

    site.later(LAUNCHER_S, restart)
    return f"launcher of rank {rank} (process {launcher.pid})"


def _stop_launcher(site: Site) -> str:
    rank = site.rng.randrange(site.num_ranks)
    launcher = site.cluster.workers[rank].pid
    os.kill(launcher, signal.SIGSTOP)
    site.later(STOP_S, lambda: _kill(launcher, signal.SIGCONT))
    return f"launcher of rank {rank} (process {launcher})"


def _stop_controller(site: Site) -> str:
    """This process: somebody else has to wake it up."""
    me = os.getpid()
    script = f"kill -STOP {me}; sleep {STOP_S}; kill -CONT {me}"
    process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.DEVNULL)
    site.later(0.0, partial(_reap, process))
    return f"controller (process {me})"


def _raise(where: str) -> Strike:
    def strike(site: Site) -> str:
        rank = site.rng.randrange(site.num_ranks)
        order = site.folder / f"rank-{rank}"
        draft = site.folder / "draft"
        draft.write_text(where)
        draft.rename(order)
        return f"rank {rank} {where} a collective"

    return strike


def _cut(site: Site) -> str:
    node = site.rng.randrange(1, len(site.cluster.ranks_per_node))
    site.say(f"cut {node}")
    site.later(CUT_S, lambda: site.say(f"heal {node}"))
    return f"link of node {node}"


def _stall(site: Site) -> str:
    site.say(f"stall {PAUSE_S}")
    return "all links"


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


KINDS: Mapping[str, Kind] = {
    "kill-rank": Kind(strike=_signal_rank(signal.SIGKILL)),
    "stop-rank": Kind(strike=_signal_rank(signal.SIGSTOP)),
    "pause-rank": Kind(strike=_signal_rank(signal.SIGSTOP, signal.SIGCONT), restarts=False, lasts_s=PAUSE_S),
    "kill-relay": Kind(strike=_signal_relay(signal.SIGKILL)),
    "stop-relay": Kind(strike=_signal_relay(signal.SIGSTOP)),
    "kill-keeper": Kind(strike=_signal_keeper(signal.SIGKILL, LAUNCHER_S)),
    "stop-keeper": Kind(strike=_signal_keeper(signal.SIGSTOP, 4.0), lasts_s=4.0),
    "kill-launcher": Kind(strike=_kill_launcher),
    "stop-launcher": Kind(strike=_stop_launcher, restarts=False, lasts_s=STOP_S),
    "stop-controller": Kind(strike=_stop_controller, restarts=False, lasts_s=STOP_S),
    "raise-before": Kind(strike=_raise("before")),
    "raise-inside": Kind(strike=_raise("inside")),
    "raise-after": Kind(strike=_raise("after")),
    "cut-link": Kind(strike=_cut, lasts_s=CUT_S, needs_network=True),
    "stall-link": Kind(strike=_stall, restarts=False, lasts_s=PAUSE_S, needs_network=True),
}
