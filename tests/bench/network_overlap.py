"""How much of a slow network two halves hide: step time whole and split, over batch sizes and one-way delays.

    sudo python tests/bench/network_overlap.py --network .../delaynet.py --model CKPT
    sudo python tests/bench/network_overlap.py --network ... --model CKPT --waits 10,2,12 --batches 32

Ranks are processes in network namespaces (network_rank.py), dp of them; the engine drives them as on one machine.
With `--waits A,S,E` attention, shared expert and experts of a layer take so many ms for the largest batch, asleep;
without it they compute. A line of the table:

    whole, halves     ms a decode step, by turns
    auto              what the threshold that these figures give makes of a step
    waits             ms that a rank waits for exchanges over ep in a whole step and in halves, by a trace of other
                      steps, less what it waits without delay
    compute           ms of a whole step without delay
    halves, no delay  ms of a step in halves without delay: what is done twice shows here
    network           ms that the delay makes exchanges take: two a layer with experts, each one way, no bandwidth
    reach             least that two halves can take: the compute, or half of it and the network
    hidden            how much of the waits of whole steps is not waited for by halves, beyond what out of reach is
    gained            how much of what whole steps take longer than the larger of compute and network, halves do not

Each half has its own exchanges one after the other, with nothing but the other's compute to hide them behind: that is
what `reach` says. The last exchange of a pass has nothing at all; that counts as not hidden. `--trace FILE` keeps a
trace of a few steps. `--quantile` below 0.5 suits a busy machine, which makes some steps longer and none shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from launch.deployment import start
from launch.trace_file import start_trace, write_trace
from parallel.trace import HALF_A, HALF_B, WHOLE
from runtime.channel import Traceable
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.rank_channel import RankChannel
from runtime.split_calibration import SplitPoint, StepTimer, choose_threshold, describe
from runtime.step_planner import NEVER
from tests.bench.network_rank import EXCHANGE, FOLDER, WAITS

COLUMNS = (
    "whole", "halves", "auto", "whole_waits", "halves_waits", "compute", "halves_no delay", "network", "reach"
)
SHARES = ("hidden", "gained")
TRACED_STEPS = 8


class Network:
    """The switch, as a child; it takes commands."""

    def __init__(self, switch: Path, num_hosts: int, rate_mbit: float) -> None:
        command = [sys.executable, str(switch), "--hosts", str(num_hosts), "--rate-mbit", str(rate_mbit)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        while b"ready" not in (line := self._process.stderr.readline()):
            if not line:
                raise RuntimeError(f"{switch} ended with code {self._process.wait()}: are you root?")

    def delay(self, ms: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"delay {ms}\n".encode())
        self._process.stdin.flush()
        time.sleep(0.2)

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


@contextmanager
def engine_over(args: argparse.Namespace, exchange: str) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        largest = max(args.batches) * (1 + args.draft_tokens)
        waits: dict[str, float] = {}
        if args.waits:
            attention, shared, experts = (1e3 * ms / largest for ms in args.waits)
            waits = {"attention": attention, "shared": shared, "experts": experts}
        os.environ.update({FOLDER: folder, EXCHANGE: exchange, WAITS: json.dumps(waits)})
        config = EngineConfig(
            model=args.model, dp=args.ranks, draft_tokens=args.draft_tokens, max_num_seqs=max(args.batches),
            draft_method="mtp" if args.draft_tokens else "off", max_model_len=512, prefix_cache=False, debug=args.debug,
        )
        engine = Engine(config, deployment=start(config, module="tests.bench.network_rank"))
        try:
            yield engine
        finally:
            engine.close()


def deepen(model: Path, num_layers: int, folder: Path) -> Path:
    """The same checkpoint with as many layers, those with experts repeated: for times, its text is nonsense."""
    config = json.loads((model / "config.json").read_text())
    dense, last = config["first_k_dense_replace"], config["num_hidden_layers"]
    source = {dense + i: dense + i % (last - dense) for i in range(num_layers - dense)} | {i: i for i in range(dense)}
    source |= {num_layers + i: last + i for i in range(config["num_nextn_predict_layers"])}
    tensors: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            head, _, rest = name.partition("model.layers.")
            number, _, tail = rest.partition(".")
            copies = [new for new, old in source.items() if rest and str(old) == number]
            names = [f"{head}model.layers.{new}.{tail}" for new in copies] if rest else [name]
            tensors |= {new: tensor.clone() for new in names}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    return folder


@dataclass(frozen=True, kw_only=True)
class Point:
    """One batch size: seconds of a step, and of it what a rank waits for exchanges, whole and as two halves."""

    times: SplitPoint
    whole_waits_s: float
    halves_waits_s: float
    num_exchanges: float  # of a whole step, one after the other


def measure(args: argparse.Namespace, network: Network, exchange: str) -> list[dict[str, float | str]]:
    """Rows of the table."""
    rows: list[dict[str, float | str]] = []
    with engine_over(args, exchange) as engine:
        timer = StepTimer(engine, rounds=args.rounds)
        network.delay(0.0)
        timer.point(max(args.batches))  # warm up
        plain = {batch: point(engine, timer, batch, args.quantile) for batch in args.batches}
        for delay in args.delays:
            network.delay(delay)
            points = {batch: point(engine, timer, batch, args.quantile) for batch in args.batches}
            measured = [found.times for found in points.values()]
            threshold = choose_threshold(measured)
            sys.stderr.write(f"{exchange}, {delay} ms: {describe(threshold, measured)}\n")
            for batch, found in points.items():
                figures = row(delay, plain[batch], found, threshold)
                rows.append({"exchange": exchange, "delay": delay, "batch": batch, **figures})
        if args.trace is not None:
            trace(engine, timer, network, args)
        if args.debug:
            assert isinstance(engine.channel, RankChannel)
            steps = engine.channel.num_compared_steps
            sys.stderr.write(f"{exchange}: all ranks made the same calls in the same order in each of {steps} steps\n")
    return rows


def point(engine: Engine, timer: StepTimer, batch: int, quantile: float) -> Point:
    whole, halves = timer.times(batch)
    timer.start(batch)
    (whole_waits, num_exchanges), (halves_waits, _) = waits(engine, NEVER), waits(engine, 1)
    timer.end()
    num_tokens = batch * (1 + engine.config.k)
    times = (float(np.quantile(seconds, quantile)) for seconds in (whole, halves))
    return Point(
        times=SplitPoint(num_tokens=num_tokens, whole_s=next(times), halves_s=next(times)), whole_waits_s=whole_waits,
        halves_waits_s=halves_waits, num_exchanges=num_exchanges,
    )


def waits(engine: Engine, split_min_tokens: int) -> tuple[float, float]:
    """Seconds a step that ranks wait for exchanges inside of passes, the median over steps, and the number of waits."""
    assert isinstance(engine.channel, Traceable)
    engine.planner.split_min_tokens = split_min_tokens
    engine.step()
    engine.channel.start_trace()
    for _ in range(TRACED_STEPS):
        engine.step()
    seconds, count = [], 0
    for rank in engine.channel.stop_trace():
        found: dict[int, int] = defaultdict(int)
        for span in rank.spans:
            if span.name.startswith("wait for ") and span.track in (WHOLE, HALF_A, HALF_B):
                found[span.step] += span.end - span.begin
                count += 1
        seconds += [1e-9 * total for total in found.values()]
    return (float(np.median(seconds)) if seconds else 0.0), count / max(len(seconds), 1)


def row(delay: float, plain: Point, found: Point, threshold: int) -> dict[str, float | str]:
    times, compute_s = found.times, plain.times.whole_s
    network_s = found.num_exchanges * delay / 1e3
    reach_s = max(compute_s, compute_s / 2 + network_s)
    whole_waits_s = max(found.whole_waits_s - plain.whole_waits_s, 0.0)
    halves_waits_s = max(found.halves_waits_s - plain.halves_waits_s, 0.0)
    return {
        "whole": times.whole_s, "halves": times.halves_s,
        "auto": times.halves_s if times.num_tokens >= threshold else times.whole_s,
        "whole_waits": whole_waits_s, "halves_waits": halves_waits_s, "compute": compute_s,
        "halves_no delay": plain.times.halves_s, "network": network_s, "reach": reach_s,
        "hidden": share(whole_waits_s - halves_waits_s, whole_waits_s - (reach_s - compute_s)),
        "gained": share(times.whole_s - times.halves_s, times.whole_s - max(compute_s, network_s)),
    }


def share(part_s: float, whole_s: float) -> str:
    """"-" where there is too little to speak of."""
    return f"{100 * part_s / whole_s:.0f} %" if whole_s > 1e-3 else "-"


def trace(engine: Engine, timer: StepTimer, network: Network, args: argparse.Namespace) -> None:
    """Some steps of the largest batch at the middle delay, whole and as two halves."""
    network.delay(sorted(args.delays)[len(args.delays) // 2])
    timer.start(max(args.batches))
    start_trace(engine)
    for threshold in (NEVER, 1):
        engine.planner.split_min_tokens = threshold
        for _ in range(4):
            engine.step()
    sys.stderr.write(write_trace(engine, args.trace) + "\n")
    timer.end()


def table(rows: Sequence[dict[str, float | str]]) -> str:
    names = ("exchange", "delay, ms", "batch", *(name.replace("_", ", ") for name in COLUMNS), *SHARES)
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for found in rows:
        times = (f"{1e3 * float(found[name]):.1f}" for name in COLUMNS)
        cells = str(found["exchange"]), str(found["delay"]), str(found["batch"]), *times
        lines.append("| " + " | ".join([*cells, *(str(found[name]) for name in SHARES)]) + " |")
    return "\n".join(lines)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", type=Path, required=True, help="the switch between namespaces")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="the model's, some of them repeated; as many as it has if left out")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--exchanges", default="sockets,gloo")
    parser.add_argument("--delays", type=numbers, default=[0.5, 2.0, 5.0], help="one-way, in ms")
    parser.add_argument("--rate-mbit", type=float, default=0.0, help="of a host; 0: no limit")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16, 64], help="requests of each rank")
    parser.add_argument("--draft-tokens", type=int, default=1)
    parser.add_argument("--waits", type=numbers, help="ms a layer for attention, shared expert, experts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantile", type=float, default=0.5)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--debug", action="store_true", help="compare the ledgers of all ranks after every step")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.batches = [int(batch) for batch in args.batches]
    network, rows = Network(args.network, args.ranks, args.rate_mbit), []
    with tempfile.TemporaryDirectory() as folder:
        if args.layers:
            args.model = deepen(args.model, args.layers, Path(folder))
        try:
            for exchange in args.exchanges.split(","):
                rows += measure(args, network, exchange)
        finally:
            network.close()
    sys.stdout.write((json.dumps(rows) if args.json else table(rows)) + "\n")


if __name__ == "__main__":
    main()
