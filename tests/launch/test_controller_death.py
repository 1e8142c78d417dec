"""The controller as a process of its own: where it is found, and what becomes of its workers when it ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.exit_codes import EXIT_CONFIG, EXIT_PEER_LOST
from tests.launch.cluster_driver import ANY_SOURCE, FAKE
from tests.launch.dying import children, is_running, wait_until

SETTINGS = ("--set", "parallel.dp=2", "--set", ANY_SOURCE)
LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """`processes`: of both workers, with all their children."""

    controller: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]
    processes: list[int]
    address_file: Path


@contextmanager
def launched(folder: Path) -> Iterator[Launch]:
    """A controller and two workers, up to where one rank hangs in the first epoch."""
    file = folder / "address"
    command = [sys.executable, "-m", "launch.cli", "controller", "--address-file", str(file), *SETTINGS, "a prompt"]
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    workers = []
    try:
        for rank in range(2):
            worker = [sys.executable, "-m", "launch.worker", "--controller", str(file), "--rank-module", FAKE]
            worker += SETTINGS
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
                "FAKE_CLUSTER_RANK": "0:1:0:hang",
            }
            assert wait_until(file.exists, 30)
            workers.append(subprocess.Popen(worker, env=environment, stderr=subprocess.PIPE))
        # Keeper 1 has a spare once its rank is in the epoch.
        assert wait_until(lambda: len(children(workers[1].pid)) == 3, 30)
        processes = [pid for worker in workers for pid in (worker.pid, *children(worker.pid))]
        assert len(processes) >= 7, processes
        yield Launch(controller=controller, workers=workers, processes=processes, address_file=file)
    finally:
        for process in (controller, *workers):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_controller(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path) as launch:
        assert stat.S_IMODE(launch.address_file.stat().st_mode) == 0o600
        launch.controller.send_signal(number)
        for worker in launch.workers:
            _, stderr = worker.communicate(timeout=LIMIT_S)
            if number == signal.SIGTERM:
                assert worker.returncode == 128 + number
                assert b"error: the controller was ended by SIGTERM" in stderr
            else:
                assert worker.returncode == EXIT_PEER_LOST
                assert b"error: the controller is gone: " in stderr
        assert wait_until(lambda: not any(is_running(pid) for pid in launch.processes), LIMIT_S)
        launch.controller.wait(LIMIT_S)
        assert launch.controller.returncode == (128 + number if number == signal.SIGTERM else -number)
        assert launch.address_file.exists() == (number == signal.SIGKILL)


def test_controller_and_worker_end_alike_when_the_launch_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "address"
    command = [sys.executable, "-m", "launch.cli", "controller", "--address-file", str(file), *SETTINGS, "a prompt"]
    controller = subprocess.Popen(command, stderr=subprocess.PIPE)
    environment = {**os.environ, "LOCKSTEP_CONTROLLER": str(file), "RANK": "0", "WORLD_SIZE": "1"}
    try:
        assert wait_until(file.exists, 30)
        worker = [sys.executable, "-m", "launch.worker", "--rank-module", FAKE, *SETTINGS]
        told = subprocess.run(worker, env=environment, stderr=subprocess.PIPE, timeout=30, check=False)
        _, stderr = controller.communicate(timeout=LIMIT_S)
    finally:
        controller.kill()
        controller.communicate()
    assert told.returncode == controller.returncode == EXIT_CONFIG
    for said in (told.stderr, stderr):
        assert b"error: WORLD_SIZE = 1 on rank 0, local rank 0 of node 0" in said
    assert not file.exists()
