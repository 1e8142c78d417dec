"""One launch under Ray: bundles, actors, and the processes that they host, from the start to the last exit code."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.cluster_address import SECRET_VARIABLE, format_address
from launch.config import LaunchConfig
from launch.exit_codes import EXIT_OK, EXIT_PEER_LOST
from launch.ray_host import ProcessHost
from launch.ray_plan import Seat, forwarded, seat_ranks, variables, visible_devices

POLL_S = 0.2
CALL_S = 30.0  # for one call of an actor, which does next to nothing
ADDRESS_S = 60.0  # for the controller to listen
RESTART_AFTER_S = 2.0  # a worker that ended while the controller runs on is started again
MAX_RESTARTS = 5  # of one rank's worker
END_S = 20.0  # for workers to end after the controller


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """`address`: of a Ray cluster ("auto": the one of this machine), None: a new one here. `host`: where the controller
    listens, None: its node's address. `arguments`: for `lockstep controller`."""

    config: Path | None = None
    overrides: Sequence[str] = ()
    address: str | None = None
    host: str | None = None
    cpus_per_rank: float | None = None
    place_s: float = 120.0
    arguments: Sequence[str] = ()


@dataclass
class _Worker:
    """One rank's actor. `ended`: when its process or its actor was first seen to have ended."""

    seat: Seat
    host: Any
    environment: dict[str, str] = field(default_factory=dict)
    code: int | None = None
    ended: float | None = None
    num_restarts: int = 0


class RayLaunch:
    """Everything that one launch has in Ray; `end` gives it back."""

    def __init__(self, ray: Any, config: LaunchConfig, options: RayOptions) -> None:
        self._ray, self._config, self._options = ray, config, options
        self._groups: list[Any] = []
        self._workers: list[_Worker] = []
        self._controller: Any = None
        self._address = ""
        self._looked = 0.0
        self._actor = ray.remote(ProcessHost)
        self._bundle = {"CPU": options.cpus_per_rank or float(config.engine.threads)}
        if not config.engine.device.startswith("cpu"):
            self._bundle["GPU"] = 1.0

    def place(self) -> None:
        """Reserve a bundle for each rank, those of a tp group on one node, and put an actor on each."""
        from ray.util import placement_group, placement_group_table

        parallel = self._config.parallel
        self._groups = [
            placement_group([dict(self._bundle)] * parallel.tp, strategy="STRICT_PACK") for _ in range(parallel.dp)
        ]
        try:
            self._ray.get([group.ready() for group in self._groups], timeout=self._options.place_s)
        except self._ray.exceptions.GetTimeoutError:
            raise ValueError(
                f"Ray has not placed {parallel.dp} groups of {parallel.tp} x {self._bundle} on single nodes within "
                f"{self._options.place_s:g} s; it has {_room(self._ray.cluster_resources())}"
            ) from None
        nodes = [
            [placement_group_table(group)["bundles_to_node_id"][bundle] for bundle in range(parallel.tp)]
            for group in self._groups
        ]
        self._workers = [_Worker(seat=seat, host=self._new_host(seat)) for seat in seat_ranks(nodes)]

    def start(self) -> None:
        """The controller first, on the node of rank 0; then all workers, each with its place and its devices."""
        common = forwarded(os.environ) | {SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)}
        places = self._call_all([worker.host.where.remote() for worker in self._workers])
        for worker, (node, _, _) in zip(self._workers, places, strict=True):
            worker.seat = replace(worker.seat, node=node)
        devices = visible_devices([w.seat for w in self._workers], [place[2] for place in places])
        self._start_controller(places[0][1], common)
        for worker, (_, address, _), visible in zip(self._workers, places, devices, strict=True):
            worker.environment = common | variables(worker.seat.env)
            if self._options.host is None:  # else each finds its own address on the way to the controller's
                worker.environment["LOCKSTEP_ADVERTISE"] = address
            if visible is not None:
                worker.environment["CUDA_VISIBLE_DEVICES"] = visible
        self._call_all([self._start_worker(worker) for worker in self._workers])

    def follow(self) -> int:
        """Pass on what the processes print until the controller ends; the job's exit code, as subprocess tells it."""
        while (code := self._pump_controller()) is None:
            if time.monotonic() - self._looked >= 1.0:
                self._look_after_workers()
            time.sleep(POLL_S)
        until = time.monotonic() + END_S
        while any(worker.code is None for worker in self._workers) and time.monotonic() < until:
            self._pump_workers()
            time.sleep(POLL_S)
        others = [worker.code for worker in self._workers if worker.code]
        return code if code != EXIT_OK or not others else others[0]

    def send_signal(self, number: int) -> None:
        """To the controller, which tells everybody else."""
        if self._controller is not None:
            self._controller.send_signal.remote(number)

    def end(self) -> None:
        """End every process and actor that is left, and give the bundles back. Never raises."""
        from ray.util import remove_placement_group

        hosts = [host for host in (self._controller, *(worker.host for worker in self._workers)) if host is not None]
        self._ray.wait([host.stop.remote() for host in hosts], num_returns=len(hosts), timeout=END_S) if hosts else None
        for host in hosts:
            self._ray.kill(host)
        for group in self._groups:
            remove_placement_group(group)
        self._workers, self._groups, self._controller = [], [], None

    def _new_host(self, seat: Seat) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(
            placement_group=self._groups[seat.group], placement_group_bundle_index=seat.bundle
        )
        return self._actor.options(
            num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0), scheduling_strategy=place,
        ).remote()

    def _start_controller(self, address: str, common: dict[str, str]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        beside_rank_0 = NodeAffinitySchedulingStrategy(node_id=self._workers[0].seat.node, soft=False)
        self._controller = self._actor.options(num_cpus=0, scheduling_strategy=beside_rank_0).remote()
        file = self._call(self._controller.address_file.remote())
        listen = format_address(self._options.host or address, 0)
        command = [sys.executable, "-m", "launch.cli", "controller", *self._settings(), "--listen", listen,
                   "--address-file", file, *self._options.arguments]
        self._call(self._controller.start.remote(command, common))
        until = time.monotonic() + ADDRESS_S
        while not self._address:
            code = self._pump_controller()
            if code is None and time.monotonic() > until:
                sys.stderr.write(f"lockstep: error: the controller has no address {ADDRESS_S:g} s after its start\n")
            if code is not None or time.monotonic() > until:
                raise ControllerEnded(code)
            self._address = self._call(self._controller.read.remote(file))
            time.sleep(POLL_S)

    def _start_worker(self, worker: _Worker) -> Any:
        command = [sys.executable, "-m", "launch.worker", *self._settings(), "--controller", self._address]
        return worker.host.start.remote(command, worker.environment)

    def _settings(self) -> list[str]:
        config = [] if self._options.config is None else ["--config", str(self._options.config.resolve())]
        return config + [part for override in self._options.overrides for part in ("--set", override)]

    def _pump_controller(self) -> int | None:
        chunks, code = self._call(self._controller.output.remote())
        _write(chunks)
        return code if code is None else int(code)

    def _pump_workers(self) -> None:
        """What workers print goes to standard error: standard output is the controller's."""
        running = [worker for worker in self._workers if worker.code is None]
        for worker, call in [(worker, worker.host.output.remote()) for worker in running]:
            try:
                chunks, worker.code = self._call(call)
                _write([("err", data) for _, data in chunks])
            except self._ray.exceptions.RayError:
                worker.code = EXIT_PEER_LOST  # the actor is gone, and its process with it
            if worker.code is not None:
                worker.ended = time.monotonic()

    def _look_after_workers(self) -> None:
        """A worker that is lost while the controller runs on gets another one in its bundle."""
        self._looked = time.monotonic()
        self._pump_workers()
        for worker in self._workers:
            if worker.code and worker.ended is not None and self._looked - worker.ended > RESTART_AFTER_S:
                self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        if worker.num_restarts >= MAX_RESTARTS:
            return  # the controller gives up when it has waited long enough
        worker.num_restarts += 1
        sys.stderr.write(
            f"lockstep: the worker of rank {worker.seat.env.rank} has ended ({worker.code}); another one is started\n"
        )
        self._ray.kill(worker.host)
        worker.host, worker.code, worker.ended = self._new_host(worker.seat), None, None
        try:
            node, _, _ = self._call(worker.host.where.remote())
            if node != worker.seat.node:
                raise ValueError(f"its bundle has moved to node {node}")
            self._call(self._start_worker(worker))
        except (ValueError, self._ray.exceptions.RayError) as error:
            worker.code, worker.ended = EXIT_PEER_LOST, time.monotonic() + CALL_S
            sys.stderr.write(f"lockstep: rank {worker.seat.env.rank} cannot be started again: {error}\n")

    def _call(self, call: Any) -> Any:
        return self._ray.get(call, timeout=CALL_S)

    def _call_all(self, calls: Sequence[Any]) -> list[Any]:
        return list(self._ray.get(list(calls), timeout=self._options.place_s))


class ControllerEnded(Exception):  # noqa: N818  (no error: how a controller that never listened has ended)
    """The controller ended before it listened."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


def _write(chunks: Sequence[tuple[str, bytes]]) -> None:
    for name, data in chunks:
        stream = sys.stdout if name == "out" else sys.stderr
        stream.flush()
        stream.buffer.write(data)
        stream.buffer.flush()


def _room(resources: dict[str, float]) -> str:
    return ", ".join(f"{name} {count:g}" for name, count in sorted(resources.items()) if name in ("CPU", "GPU"))
