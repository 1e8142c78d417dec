"""Launches that cannot work end on every node, with one clear error, and none hangs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.exit_codes import EXIT_CONFIG, EXIT_PEER_LOST, EXIT_USAGE
from launch.local_cluster import LocalCluster
from tests.launch.cluster_driver import ANY_SOURCE, FAKE

SETTINGS = ("parallel.dp=2", ANY_SOURCE)


def piped(_rank: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


@contextmanager
def two_workers(*more: str) -> Iterator[LocalCluster]:
    """A cluster whose workers are started one by one; `start` may be given other settings for each."""
    settings = [*SETTINGS, *more]
    with LocalCluster(
        config=None, ranks_per_node=(1, 1), overrides=settings, rank_module=FAKE, start_worker=piped
    ) as local:
        yield local


def outcome(local: LocalCluster, rank: int) -> tuple[int, str]:
    """(exit code, what it said) of a worker."""
    _, stderr = local.workers[rank].communicate(timeout=30)
    return local.workers[rank].returncode, stderr.decode()


def refused(local: LocalCluster, told: str, *, code: int = EXIT_CONFIG, ranks: Sequence[int] = (0, 1)) -> None:
    """Controller and workers end with the same error."""
    with pytest.raises(ValueError, match=told) as refusal:
        local.controller.deploy(gather_s=30.0)
    for rank in ranks:
        found, text = outcome(local, rank)
        assert found == code, text
        assert f"error: {refusal.value}" in text


def test_a_rank_twice() -> None:
    with two_workers() as local:
        local.start(0)
        local.environment = {"RANK": "0"}
        local.start(1)
        refused(local, r"^RANK = 0 twice: rank 0, local rank 0 of node . \(.*process \d+\) and rank 0, local rank 0 of")


def test_another_world_size() -> None:
    with two_workers() as local:
        local.environment = {"WORLD_SIZE": "1", "NNODES": "1"}
        local.start(0)
        refused(local, r"^WORLD_SIZE = 1 on rank 0.*dp \* tp = 2 ranks: start 2 processes", ranks=(0,))


def test_a_rank_that_does_not_come() -> None:
    with two_workers("cluster.join_s=1") as local:
        local.start(1)
        refused(local, r"^1 of 2 ranks came within 1 s of the first, not 0$", ranks=(1,))


def test_another_configuration() -> None:
    with two_workers() as local:
        local.start(0)
        local.overrides = [*SETTINGS, "engine.page_size=32"]
        local.start(1)
        refused(local, r"differ in 2 things:\n(.*\n)*.*config engine.page_size +16 +\[controller,r0\]\n +32 +\[r1\]$")


def test_another_capacity_of_dispatch() -> None:
    with two_workers() as local:
        local.start(0)
        local.overrides = [*SETTINGS, "parallel.dispatch_capacity=2000"]
        local.start(1)
        refused(local, r"dispatch capacity +577 +\[controller,r0\]\n +2000 +\[r1\]")


def test_shared_memory_between_hosts() -> None:
    with two_workers('parallel.exchange="shared_memory"') as local:
        local.start(0)
        local.start(1)
        refused(local, r'^parallel.exchange = "shared_memory": the ranks are on nodes \[0, 1\].* "auto" or "sockets"')


def test_other_weights(minnow: Path, tmp_path: Path) -> None:
    """One byte of a file of the model."""
    for file in minnow.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-1] ^= 1
        (tmp_path / file.name).write_bytes(data)
    with two_workers() as local:
        local.start(0)
        local.overrides = [*SETTINGS, f"model.path={tmp_path}"]
        local.start(1)
        refused(local, r"differ in 1 thing:\n.*\n +model model.safetensors .*\[controller,r0\]\n.*\[r1\]$")


def test_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SECRET", "the secret of this launch")
    with two_workers("cluster.join_s=1") as local:
        local.environment = {"LOCKSTEP_SECRET": "the secret of another one"}
        local.start(1)
        code, text = outcome(local, 1)
        assert code == EXIT_CONFIG
        assert "set the same LOCKSTEP_SECRET on both sides" in text
        local.environment = {}
        local.start(0)
        refused(local, r"^1 of 2 ranks came within 1 s of the first, not 1; refused: keeper at ", ranks=(0,))


@pytest.mark.parametrize(
    ("address", "fault"), [("192.0.2.1", "Cannot assign requested address"), ("0.0.0.0", "stands for all addresses")]
)
def test_an_address_that_is_no_address_of_this_host(address: str, fault: str) -> None:
    with two_workers() as local:
        local.environment = {"LOCKSTEP_ADVERTISE": address}
        local.start(0)
        code, text = outcome(local, 0)
        assert code == EXIT_USAGE, text
        assert f"cluster.advertise or LOCKSTEP_ADVERTISE = {address}: {fault}; expected one address of" in text


@pytest.mark.parametrize(
    ("environment", "code", "told"),
    [
        ({"LOCKSTEP_CONTROLLER": "127.0.0.1:1"}, EXIT_PEER_LOST, "nobody answers at 127.0.0.1:1 within 0.3 s"),
        ({}, EXIT_USAGE, "--controller and LOCKSTEP_CONTROLLER are not set"),
        ({"LOCKSTEP_CONTROLLER": "nowhere"}, EXIT_USAGE, "'nowhere': expected HOST:PORT"),
        ({"LOCKSTEP_CONTROLLER": "127.0.0.1:1", "RANK": "x"}, EXIT_USAGE, "RANK = 'x': expected an integer"),
        ({"LOCKSTEP_CONTROLLER": "192.0.2.1:1"}, EXIT_USAGE, "set LOCKSTEP_SECRET or cluster.secret_file"),
    ],
)
def test_a_worker_that_finds_no_controller(
    environment: dict[str, str], code: int, told: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from launch.worker import main

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **environment}.items():
        monkeypatch.setenv(name, value)
    assert main(["--set", "cluster.join_s=0.3"]) == code
    assert told in capsys.readouterr().err
