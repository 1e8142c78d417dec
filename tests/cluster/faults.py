"""Faults in a cluster under load: `python -m tests.cluster.faults --kind kill-rank --repeats 50 --json`.

Eight client streams run through an engine over a cluster on this machine: controller in this process, workers as
children. Again and again something is struck at a random moment. Faults of the network need root and --network, the
program that plays the switch between network namespaces lk0, lk1, ...; its hosts are the nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from launch.local_cluster import LocalCluster
from runtime.engine import Engine
from runtime.recovery import RecoveryEvent
from tests.cluster.faulty_rank import FOLDER
from tests.cluster.injection import KINDS, Kind, Site
from tests.cluster.processes import MARK, command, has_spare, keeper_of, marked, segments
from tests.cluster.report import Incident, Report, render
from tests.cluster.starting import in_namespaces, start_worker_by_shell, start_worker_in_namespace
from tests.cluster.streams import Streams, references, requests

ROOT = Path(__file__).resolve().parents[2]
WARM_S = 1.0  # of undisturbed streams before the first fault
QUIET_S = 2.5  # after a fault that must not restart anything
GIVE_UP_S = 60.0  # for one fault
LEFT_S = 5.0  # after the end, before what is left is counted
TOKENS_AFTER = 16  # steps with tokens that must follow a recovery


@dataclass(kw_only=True)
class Log:
    """What the engine tells of its ranks, with the moment (time.monotonic)."""

    events: list[tuple[float, RecoveryEvent]] = field(default_factory=list)

    def note(self, event: RecoveryEvent) -> None:
        self.events.append((time.monotonic(), event))

    def since(self, moment: float, stage: str) -> list[tuple[float, RecoveryEvent]]:
        return [(t, event) for t, event in self.events if t >= moment and event.stage == stage]


class _Injection:
    """Strikes from a thread of its own, so that it meets the engine in the middle of whatever it does."""

    def __init__(self, kind: Kind, site: Site, delay_s: float) -> None:
        self._kind, self._site, self._delay_s = kind, site, delay_s
        self.moment: float | None = None
        self.target = ""
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        time.sleep(self._delay_s)
        before = time.monotonic()
        try:
            self.target = self._kind.strike(self._site)
        except Exception as error:  # noqa: BLE001  (raised where the streams run)
            self.error = error
        self.moment = before

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def strike_once(kind: Kind, site: Site, streams: Streams, log: Log) -> Incident:
    """One fault at a random moment of the next second, and the streams until they run again."""
    injection = _Injection(kind, site, site.rng.uniform(0.0, 1.0))
    begin = time.monotonic()
    while injection.moment is None:
        streams.step()
    injection.check()
    moment = injection.moment
    until = moment + kind.lasts_s + QUIET_S
    while time.monotonic() < begin + GIVE_UP_S + kind.lasts_s:
        streams.step()
        resumed = log.since(moment, "recovered")
        if kind.restarts and resumed and sum(t > resumed[-1][0] for t in streams.times[-TOKENS_AFTER:]) == TOKENS_AFTER:
            break
        if not kind.restarts and time.monotonic() > until:
            break
    site.wait_healed()
    lost, resumed = log.since(moment, "lost"), log.since(moment, "recovered")
    return Incident(
        target=injection.target, detection_s=lost[0][0] - moment if lost else None,
        recovery_s=resumed[-1][0] - moment if resumed else None,
        interruption_s=streams.longest_gap(moment) if resumed or not kind.restarts else None,
        num_restarts=len(resumed), message=lost[0][1].message if lost else "",
    )


def run_streams(streams: Streams, seconds: float, cluster: LocalCluster, spares: bool) -> None:
    """Let the streams run undisturbed, and with `spares` on until every rank has its spare again."""
    begin = time.monotonic()
    while time.monotonic() < begin + seconds or (spares and not _has_spares(cluster)):
        streams.step()
        if time.monotonic() > begin + seconds + GIVE_UP_S:
            return


def _has_spares(cluster: LocalCluster) -> bool:
    keepers = [keeper_of(worker.pid) for worker in cluster.workers.values()]
    return all(keeper is not None and has_spare(keeper) for keeper in keepers)


def run(options: argparse.Namespace, network: TextIO | None) -> Report:
    """All faults of one kind on one cluster."""
    kind = KINDS[options.kind]
    mark = uuid.uuid4().hex
    before = segments()
    report = Report(kind=options.kind, layout=f"dp {options.dp} x tp {options.tp} on nodes of {options.nodes}")
    with tempfile.TemporaryDirectory() as folder, _cluster(options, Path(folder), mark, network) as cluster:
        asked = requests()
        expected = references(cluster.engine_config, asked)
        log = Log()
        engine = Engine(cluster.engine_config, deployment=cluster.deploy(), on_event=log.note)
        try:
            streams = Streams(engine, asked, expected)
            report.tally = streams.tally
            site = Site(cluster=cluster, rng=random.Random(options.seed), folder=Path(folder), network=network)
            for repeat in range(options.repeats):
                run_streams(streams, options.gap if repeat else WARM_S, cluster, options.spares)
                report.incidents.append(strike_once(kind, site, streams, log))
                _tell(options, repeat, report.incidents[-1])
        finally:
            engine.close()
    report.exit_codes = {rank: worker.wait() for rank, worker in cluster.workers.items()}
    time.sleep(LEFT_S)
    report.orphans = [f"{pid}: {command(pid)}" for pid in marked(mark)]
    report.segments = sorted(set(segments()) - set(before))
    return report


@contextmanager
def _cluster(options: argparse.Namespace, folder: Path, mark: str, network: TextIO | None) -> Iterator[LocalCluster]:
    nodes = [int(count) for count in options.nodes.split(",")]
    overrides = [
        f"model.path={ROOT / 'configs' / 'minnow'}", "model.storage=float32", "model.max_model_len=128",
        "engine.max_num_seqs=8", f"parallel.dp={options.dp}", f"parallel.tp={options.tp}",
        "cluster.max_restarts=1000000",
        'cluster.may_differ=["lockstep"]',  # somebody may work on this checkout while it runs
        *options.set,
    ]
    inside = network is not None
    cluster = LocalCluster(
        config=None, ranks_per_node=nodes, overrides=overrides, rank_module="tests.cluster.faulty_rank",
        environment={FOLDER: str(folder), MARK: mark}, listen="10.77.0.1:0" if inside else None,
        start_worker=start_worker_in_namespace(nodes) if inside else start_worker_by_shell,
    )
    with cluster:
        yield cluster


def _tell(options: argparse.Namespace, repeat: int, incident: Incident) -> None:
    def show(seconds: float | None) -> str:
        return "never" if seconds is None else f"{seconds:.2f} s"

    sys.stderr.write(
        f"{repeat + 1}/{options.repeats} {options.kind} {incident.target}: known after {show(incident.detection_s)}, "
        f"interrupted for {show(incident.interruption_s)}; {incident.message}\n"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.faults", description=__doc__)
    parser.add_argument("--kind", choices=[*KINDS, "all"], required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--nodes", default="1,1", help="ranks of each node")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--gap", type=float, default=2.0, help="seconds of undisturbed streams between two faults")
    parser.add_argument("--no-spares", dest="spares", action="store_false", help="strike before spares are there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--network", type=Path, help="the program that plays the switch; needs root")
    parser.add_argument("--delay-ms", type=float, default=0.5, help="of that network, one way")
    parser.add_argument("--network-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="every incident, as one JSON object")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing was lost, 1 when something was."""
    options = parse(arguments)
    if options.network is not None and options.network_fd is None:
        num_nodes = len(options.nodes.split(","))
        given = sys.argv[1:] if arguments is None else arguments
        return in_namespaces(options.network, num_nodes, options.delay_ms, "tests.cluster.faults", given)
    network = os.fdopen(options.network_fd, "w") if options.network_fd is not None else None
    report = run(options, network)
    figures = report.figures()
    print(json.dumps(report.details()) if options.json else render(figures))  # noqa: T201
    return int(any(value for name, value in figures.items() if name.startswith("num_") and name in MUST_BE_ZERO))


MUST_BE_ZERO = (
    "num_not_resumed", "num_failed_requests", "num_lost_tokens", "num_repeated_tokens", "num_other_differences",
    "num_orphans", "num_segments_left",
)

if __name__ == "__main__":
    sys.exit(main())
