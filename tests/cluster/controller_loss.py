"""The loss of the controller: `python -m tests.cluster.controller_loss --repeats 10 --json`.

The controller runs in a process of its own, with streams; workers are children of this one, which plays the launcher.
The controller is killed at a random moment; workers, ranks and relays must end within seconds, with the job's exit
code, and nothing may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.config import load_config
from launch.controller import Controller
from launch.exit_codes import EXIT_PEER_LOST
from runtime.engine import Engine
from tests.cluster.processes import MARK, command, marked, segments
from tests.cluster.report import render, spread
from tests.cluster.streams import Streams, requests

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0  # for a cluster to come up
END_S = 10.0  # for everything to end
RUNNING = "running"
OVERRIDES = (
    f"model.path={ROOT / 'configs' / 'minnow'}", "model.storage=float32", "model.max_model_len=128", "parallel.tp=2"
)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """`seconds` from the controller's end until the last process has ended; None: not within `END_S`."""

    seconds: float | None
    exit_codes: dict[int, int]
    orphans: list[str]


def serve(address_file: Path) -> None:
    """The controller's process: streams without an end."""
    config = load_config(None, OVERRIDES)
    engine_config = config.engine_config()
    with Controller(config, engine_config) as controller:
        controller.write_address(address_file)
        engine = Engine(engine_config, deployment=controller.deploy(gather_s=START_S))
        asked = requests()
        streams = Streams(engine, asked, [[] for _ in asked])
        while not streams.times:
            streams.step()
        sys.stdout.write(RUNNING + "\n")
        sys.stdout.flush()
        while True:
            streams.step()


def lose_controller(rng: random.Random, number: signal.Signals = signal.SIGKILL) -> Loss:
    """Bring a cluster up, send `number` to its controller, and see how the rest ends."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "address"
        controller = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.controller_loss", "--serve", str(address)], env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )
        workers = [_start_worker(rank, address, environment) for rank in range(2)]
        try:
            assert controller.stdout is not None
            line = controller.stdout.readline().strip()
            if line != RUNNING:
                raise RuntimeError(f"the controller said {line!r} and ended with code {controller.wait()}")
            time.sleep(rng.uniform(0.0, 2.0))
            controller.send_signal(number)
            return _see(mark, workers, time.monotonic())
        finally:
            started: list[subprocess.Popen[Any]] = [controller, *workers]
            for process in started:
                process.kill()
                process.wait()


def _start_worker(rank: int, address: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    until = time.monotonic() + START_S
    while not address.exists():
        if time.monotonic() > until:
            raise RuntimeError("the controller has not written its address")
        time.sleep(0.02)
    variables = {
        "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": rank, "NNODES": 2,
        "LOCKSTEP_LAUNCHER": "manual",
    }
    arguments = [part for override in OVERRIDES for part in ("--set", override)]
    return subprocess.Popen(
        [sys.executable, "-m", "launch.worker", "--controller", str(address), *arguments],
        env={**environment, **{name: str(value) for name, value in variables.items()}}, stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _see(mark: str, workers: Sequence[subprocess.Popen[bytes]], moment: float) -> Loss:
    """Wait until nothing that was started is left, the controller included."""
    seconds = None
    while time.monotonic() < moment + END_S:
        ended = [worker.poll() is not None for worker in workers]
        if all(ended) and not marked(mark):
            seconds = time.monotonic() - moment
            break
        time.sleep(0.02)
    codes = {rank: worker.poll() for rank, worker in enumerate(workers)}
    return Loss(
        seconds=seconds, exit_codes={rank: code for rank, code in codes.items() if code is not None},
        orphans=[f"{pid}: {command(pid)}" for pid in marked(mark)],
    )


def figures(losses: Sequence[Loss], left: Sequence[str]) -> dict[str, Any]:
    """What is told; everything from `num_not_ended` on must be 0."""
    codes = [code for loss in losses for code in loss.exit_codes.values()]
    return {
        "kind": "kill-controller",
        "num_faults": len(losses),
        "end_s": spread([loss.seconds for loss in losses if loss.seconds is not None]),
        "num_not_ended": sum(loss.seconds is None for loss in losses),
        "num_other_exit_codes": sum(code != EXIT_PEER_LOST for code in codes),
        "num_orphans": sum(len(loss.orphans) for loss in losses),
        "num_segments_left": len(left),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.controller_loss", description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        serve(options.serve)
    before = segments()
    rng = random.Random(options.seed)
    losses = []
    for repeat in range(options.repeats):
        losses.append(lose_controller(rng))
        sys.stderr.write(f"{repeat + 1}/{options.repeats} {losses[-1]}\n")
    found = figures(losses, sorted(set(segments()) - set(before)))
    print(json.dumps(found) if options.json else render(found))  # noqa: T201
    return int(any(value for name, value in found.items() if name.startswith("num_") and name != "num_faults"))


if __name__ == "__main__":
    sys.exit(main())
