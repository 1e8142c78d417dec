"""`lockstep ray`: seats from Ray's placement, and a launch through a stand-in for Ray with processes of ours faked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launch.cli import run_command
from launch.rank_env import RankEnv, check_world
from launch.ray_host import ProcessHost
from launch.ray_plan import forwarded, seat_ranks, variables, visible_devices
from tests.launch.fake_ray import FakeRay
from tests.launch.slurm.fakes import install

SETTINGS = ["--set", "parallel.dp=2", "--set", "parallel.tp=2"]


def test_ranks_go_node_by_node_whatever_order_groups_were_placed_in() -> None:
    seats = seat_ranks([["b", "b"], ["a", "a"], ["b", "b"]])
    check_world([seat.env for seat in seats], num_ranks=6)
    assert [(seat.env.rank, seat.node, seat.group, seat.bundle) for seat in seats] == [
        (0, "b", 0, 0), (1, "b", 0, 1), (2, "b", 2, 0), (3, "b", 2, 1), (4, "a", 1, 0), (5, "a", 1, 1),
    ]
    assert [(s.env.node_rank, s.env.local_rank, s.env.local_world_size) for s in seats] == [
        (0, 0, 4), (0, 1, 4), (0, 2, 4), (0, 3, 4), (1, 0, 2), (1, 1, 2),
    ]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [([["a", "b"]], "group 0 lies on 2 nodes"), ([["a"], ["a", "a"]], r"groups of \[1, 2\] bundles")],
)
def test_placements_that_cannot_work(nodes: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seat_ranks(nodes)


def test_a_worker_reads_the_place_that_it_was_given() -> None:
    for seat in seat_ranks([["a", "a"], ["b", "b"]]):
        env = RankEnv.from_environment(variables(seat.env))
        assert (env.rank, env.node_rank, env.local_rank, env.source) == (
            seat.env.rank, seat.env.node_rank, seat.env.local_rank, "ray"
        )


def test_a_rank_sees_its_own_device_at_its_local_rank_and_those_of_its_neighbours() -> None:
    seats = seat_ranks([["a", "a"], ["b", "b"]])
    assert visible_devices(seats, [["5"], ["3"], ["0"], ["1"]]) == ["5,3", "5,3", "0,1", "0,1"]
    assert visible_devices(seats, [[], [], [], []]) == [None] * 4
    with pytest.raises(ValueError, match=r"rank 1 the devices \[\]: expected one"):
        visible_devices(seats, [["0"], [], ["0"], ["1"]])


def test_what_one_shell_has_set_is_set_on_every_node() -> None:
    env = {"NCCL_DEBUG": "INFO", "LOCKSTEP_SECRET": "s", "LOCKSTEP_CONTROLLER": "x:1", "HOME": "/root", "HF_HOME": "/m"}
    assert forwarded(env) == {"NCCL_DEBUG": "INFO", "LOCKSTEP_SECRET": "s", "HF_HOME": "/m"}


class World:
    """A stand-in for Ray with two nodes, and for our processes, whose notes are in a folder."""

    def __init__(self, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, *nodes: str) -> None:
        self.folder = tmp_path / "notes"
        self.folder.mkdir()
        self.ray = FakeRay(nodes or ("a", "b"))
        self.ray.install(monkeypatch)
        monkeypatch.setattr(sys, "executable", str(install(tmp_path)))
        monkeypatch.delenv("LOCKSTEP_SECRET", raising=False)
        for name, value in {
            "FAKE_DIR": str(self.folder), "FAKE_ROOT": str(root), "FAKE_WORKERS": "4", "FAKE_SRUN_PID": "0",
        }.items():
            monkeypatch.setenv(name, value)

    def note(self, name: str) -> Any:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None


@pytest.fixture
def world(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, root, monkeypatch)


def test_a_launch(world: World) -> None:
    assert run_command(["ray", *SETTINGS, "--host", "127.0.0.1", "--max-tokens", "3", "a prompt"]) == 0
    workers = [world.note(f"worker{rank}") for rank in range(4)]
    assert [(note["node"], note["local"], note["source"]) for note in workers] == [
        (0, 0, "ray"), (0, 1, "ray"), (1, 0, "ray"), (1, 1, "ray"),
    ]
    controller = world.note("controller")
    assert len({note["secret"] for note in [*workers, controller]}) == 1
    assert controller["args"][-3:] == ["--max-tokens", "3", "a prompt"]
    assert controller["args"][3:7] == SETTINGS
    assert all(note["args"][-2:] == ["--controller", "127.0.0.1:4711"] for note in workers)
    *ranks, beside = [actor.options["scheduling_strategy"] for actor in world.ray.actors]
    assert [place.placement_group_bundle_index for place in ranks] == [0, 1, 0, 1]
    assert (beside.node_id, beside.soft) == ("a", False)
    assert {actor.options["num_cpus"] for actor in world.ray.actors} == {0, 1.0}
    assert world.ray.groups == []  # given back


def test_bundles_of_a_tp_group_are_packed_on_one_node(world: World) -> None:
    assert run_command(["ray", *SETTINGS, "--set", "engine.threads=3", "--set", "engine.device=cuda"]) == 0
    bundles = [{"CPU": 3.0, "GPU": 1.0}] * 2
    assert [(group.strategy, group.bundles) for group in world.ray.placed] == [("STRICT_PACK", bundles)] * 2
    assert [actor.devices for actor in world.ray.actors] == [["0"], ["1"], ["2"], ["3"], []]


def test_the_controllers_code_is_the_jobs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CONTROLLER_CODE", "69")
    assert run_command(["ray", *SETTINGS]) == 69


def test_a_controller_that_does_not_listen_starts_no_worker(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CONTROLLER_CODE", "78")
    monkeypatch.setenv("FAKE_NO_ADDRESS", "1")
    assert run_command(["ray", *SETTINGS]) == 78
    assert world.note("worker0") is None


def test_a_controller_that_stays_but_does_not_listen_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_NO_ADDRESS", "1")
    monkeypatch.setenv("FAKE_DEAF_S", "30")
    monkeypatch.setattr("launch.ray_launch.ADDRESS_S", 0.5)
    assert run_command(["ray", *SETTINGS]) == 1
    assert "the controller has no address 0.5 s after its start" in capsys.readouterr().err
    assert world.note("worker0") is None


@pytest.mark.parametrize(("host", "advertised"), [((), "127.0.0.1"), (("--host", "10.9.8.7"), None)])
def test_a_worker_gives_its_own_address_to_the_others_not_the_controllers(
    world: World, host: tuple[str, ...], advertised: str | None
) -> None:
    """With an address for the controller each worker takes the one of its node that leads there."""
    assert run_command(["ray", *SETTINGS, *host, "a prompt"]) == 0
    assert [world.note(f"worker{rank}")["advertise"] for rank in range(4)] == [advertised] * 4


def test_no_room_is_said_with_what_was_asked_and_what_is_there(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    World(tmp_path, root, monkeypatch, "a")
    assert run_command(["ray", *SETTINGS, "--place-s", "1"]) == 2
    assert capsys.readouterr().err == (
        "lockstep: error: Ray has not placed 2 groups of 2 x {'CPU': 1.0} on single nodes within 1 s; it has CPU 2\n"
    )


def test_a_worker_that_is_lost_while_the_controller_runs_is_started_again(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launch.ray_launch.RESTART_AFTER_S", 0.1)
    monkeypatch.setenv("FAKE_WORKERS", "5")  # the controller waits for one more than there are ranks
    monkeypatch.setenv("FAKE_WORKER_CODE", "70")
    noticed = threading.Event()

    def let_go() -> None:
        while "another one is started" not in capfd.readouterr().err:
            time.sleep(0.05)
        noticed.set()
        (world.folder / "worker4").write_text("{}")

    helper = threading.Thread(target=let_go)
    helper.start()
    code = run_command(["ray", *SETTINGS])
    helper.join()
    assert noticed.is_set()
    assert len(world.ray.actors) > 5
    assert code == 70


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run_command(["ray"]) == 2
    assert "pip install 'lockstep[ray]'" in capsys.readouterr().err


def test_a_host_passes_on_output_signals_and_the_exit_code() -> None:
    host = ProcessHost()
    file = host.address_file()
    assert host.read(file) == ""
    code = (
        "import os, signal, sys, time; print('ready', os.environ['X'], flush=True);"
        "open(sys.argv[1], 'w').write('here');"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); time.sleep(20)"
    )
    host.start([sys.executable, "-c", code, file], {"X": "set"})
    seen = b""
    while b"ready set" not in seen or host.read(file) != "here":
        chunks, ended = host.output()
        assert ended is None
        seen += b"".join(data for name, data in chunks if name == "out")
        time.sleep(0.01)
    time.sleep(0.2)
    host.send_signal(signal.SIGTERM)
    while (ended := host.output()[1]) is None:
        time.sleep(0.01)
    assert ended == 7
    assert host.stop() == 7


def test_an_actor_that_dies_takes_its_process_with_it(root: Path) -> None:
    code = (
        "import sys; from launch.ray_host import ProcessHost; host = ProcessHost(); "
        "print(host.start([sys.executable, '-c', 'import time; time.sleep(30)'], {}), flush=True); sys.stdin.read(1)"
    )
    actor = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert actor.stdout is not None
    pid = int(actor.stdout.readline())
    actor.kill()
    actor.wait()
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            break
        time.sleep(0.02)
    else:
        raise AssertionError(f"process {pid} outlives its actor")
