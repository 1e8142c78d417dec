"""What an exchange between hosts costs, and how much of it hides behind work: sockets beside bare asynchronous gloo.

    python tests/bench/exchange.py                                              two ranks on loopback
    sudo python tests/bench/exchange.py --network .../delaynet.py --delay-ms 2  two network namespaces

For each size: `alone` is an all_to_all of so many bytes to the other rank, started and waited for at once, and
`processor` what it takes of a core. Then it is started, work follows, as long as that or `--work-ms`, then the wait:
`step` is all of it, and the share hidden is what (alone + work - step) is of the shorter of the two. Work is a sleep
or products of matrices. Both ranks begin at one time, by the clock they share; figures in ms are of the slower rank,
medians or another quantile of `--turns`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import torch
import torch.distributed as dist

from parallel.abort import AbortSignal
from parallel.group import Group, ProcessGroup
from parallel.layout import Layout
from parallel.socket_group import ExchangeListener, build_host_groups, close_groups
from runtime.futex import best_sleeper

KINDS = ("sockets", "gloo")
WARM_UP = 5


def sockets_group(rank: int, hosts: list[str], folder: Path) -> tuple[Group, Callable[[], None]]:
    listener, abort = ExchangeListener(hosts[rank]), AbortSignal()
    (folder / f"{rank}.new").write_text(str(listener.port))
    (folder / f"{rank}.new").rename(folder / f"port{rank}")
    ports = [wait_for(folder / f"port{peer}") for peer in range(2)]
    groups = build_host_groups(
        Layout(dp=2), rank, epoch=1, addresses=list(zip(hosts, ports, strict=True)), node_of_rank=(0, 1), segments={},
        slot_bytes=0, listener=listener, secret=b"bench", sleeper=best_sleeper(), abort=abort,
    )
    return groups.ep, lambda: close_groups(groups)


def wait_for(path: Path) -> int:
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return int(path.read_text())


def gloo_group(rank: int, hosts: list[str], port: int) -> tuple[Group, Callable[[], None]]:
    dist.init_process_group(
        "gloo", init_method=f"tcp://{hosts[0]}:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    assert dist.group.WORLD is not None
    return ProcessGroup("ep", dist.group.WORLD), dist.destroy_process_group


class Products:
    """Work on one thread: products of matrices, as many as take about the time wanted beside the other rank's."""

    def __init__(self) -> None:
        self._a, self._b = torch.randn(16, 256), torch.randn(256, 256)
        self._times = 50

    def __call__(self) -> None:
        for _ in range(self._times):
            torch.mm(self._a, self._b)

    def fit(self, wanted_ms: float, measured: Callable[[], float]) -> None:
        """`measured`: what a call takes, in ms, by both ranks together."""
        for _ in range(4):
            self._times = max(1, round(self._times * wanted_ms / measured()))


def together(group: Group, delay_s: float) -> None:
    """Return on both ranks at one time. That one of them may be ahead by one way must not be counted."""
    begin = group.all_gather(torch.tensor([time.monotonic()], dtype=torch.float64)).wait().max().item()
    time.sleep(max(0.0, begin + 2 * delay_s + 0.002 - time.monotonic()))


def usual_ms(group: Group, args: argparse.Namespace, turn: Callable[[], object]) -> float:
    """What one `turn` takes on the slower rank."""
    times = []
    for _ in range(args.turns + WARM_UP):
        together(group, args.delay_ms / 1e3)
        begin = time.perf_counter()
        turn()
        times.append(time.perf_counter() - begin)
    own = 1e3 * float(np.quantile(times[WARM_UP:], args.quantile))
    return group.all_gather(torch.tensor([own], dtype=torch.float64)).wait().max().item()


def process_ms(group: Group, args: argparse.Namespace, turn: Callable[[], object]) -> float:
    """The processor's time that one `turn` takes, of all threads: little of it depends on who else uses the machine."""
    spent = []
    for _ in range(args.turns):
        together(group, args.delay_ms / 1e3)
        begin = time.process_time()
        turn()
        spent.append(time.process_time() - begin)
    return 1e3 * float(np.quantile(spent, args.quantile))


def measure(group: Group, num_bytes: int, args: argparse.Namespace) -> dict[str, float]:
    x = torch.randn(2, num_bytes // 4)
    usual = partial(usual_ms, group, args)
    alone = usual(lambda: group.all_to_all(x).wait())
    spent = process_ms(group, args, lambda: group.all_to_all(x).wait())
    found = {"kb": num_bytes / 1024, "alone_ms": alone, "processor_ms": spent}
    products, wanted = Products(), args.work_ms or alone
    products.fit(wanted, lambda: usual(products))
    works: dict[str, Callable[[], object]] = {"sleep": lambda: time.sleep(wanted / 1e3), "products": products}
    for name, work in works.items():

        def step(work: Callable[[], object] = work) -> None:
            pending = group.all_to_all(x)
            work()
            pending.wait()

        work_ms, step_ms = usual(work), usual(step)
        found |= {
            f"{name}_ms": work_ms, f"step_{name}_ms": step_ms,
            f"hidden_{name}_percent": 100 * (alone + work_ms - step_ms) / min(alone, work_ms),
        }
    return {key: round(value, 3) for key, value in found.items()}


def be_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    hosts = args.hosts.split(",")
    if args.kind == "gloo":
        group, close = gloo_group(args.rank, hosts, args.port)
    else:
        group, close = sockets_group(args.rank, hosts, args.folder)
    with torch.inference_mode():
        rows = [{"kind": args.kind, **measure(group, kb * 1024, args)} for kb in args.kb]
    group.all_to_all(torch.zeros(2, 1)).wait()
    close()
    if args.rank == 0:
        for row in rows:
            print(json.dumps({"delay_ms": args.delay_ms, **row}), flush=True)


def handed_on(args: argparse.Namespace) -> list[str]:
    """The options that every process has."""
    names = ("turns", "delay_ms", "quantile", "work_ms")
    options = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    return [*options, "--kb", *map(str, args.kb)]


def be_hosts(args: argparse.Namespace) -> int:
    """Both ranks, each in its namespace where there is a network."""
    hosts = ["10.77.0.1", "10.77.0.2"] if args.inside else ["127.0.0.1"] * 2
    code = 0
    for number, kind in enumerate(args.kinds):
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank in range(2):
                place = ["ip", "netns", "exec", f"lk{rank}"] if args.inside else []
                command = [
                    *place, sys.executable, __file__, "--rank", str(rank), "--kind", kind, "--hosts", ",".join(hosts),
                    "--folder", folder, "--port", str(29400 + number),
                    *handed_on(args),
                ]
                interface = "lk" if args.inside else "lo"
                environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
                ranks.append(subprocess.Popen(command, env=environment))
            code = max([code, *(rank.wait() for rank in ranks)])
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", type=Path, help="the script that joins network namespaces")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of the network, one way")
    parser.add_argument("--rate-mbit", type=float, default=0.0, help="of the network, 0 for any")
    parser.add_argument("--kb", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--work-ms", type=float, default=0.0, help="length of the work; 0: that of the exchange")
    parser.add_argument("--quantile", type=float, default=0.5, help="lower where others use the machine, too")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    for name in ("--rank", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    for name in ("--kind", "--hosts"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        be_rank(args)
        return 0
    if args.network is None:
        return be_hosts(args)
    again = [sys.executable, __file__, "--inside", *handed_on(args), "--kinds", *args.kinds]
    network = [
        sys.executable, str(args.network), "--delay-ms", str(args.delay_ms), "--rate-mbit", str(args.rate_mbit), "--"
    ]
    return subprocess.run([*network, *again], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
