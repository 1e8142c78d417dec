"""The batch script: what it asks Slurm for, and what it does, run with stand-ins for srun and for our processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launch.cli import run_command
from launch.config import load_config
from launch.rank_env import RankEnv, check_world
from launch.slurm.script import TEMPLATE, SlurmOptions, batch_script, ranks_per_node
from tests.launch.slurm.fakes import install

FOUR_RANKS = ("parallel.dp=2", "parallel.tp=2")
NOTHING: Mapping[str, str] = {}


def directives(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}


def write(*settings: str, options: SlurmOptions | None = None) -> str:
    return batch_script(load_config(None, settings), Path("f.toml"), options or SlurmOptions(), settings=settings)


def test_what_is_asked_of_slurm() -> None:
    options = SlurmOptions(
        ranks_per_node=2, partition="gpu", account="lab", time="1:00:00", requeue=True, sbatch=["--exclusive"]
    )
    script = write(*FOUR_RANKS, "engine.threads=3", options=options)
    asked = directives(script)
    assert {
        "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=3", "--partition=gpu", "--account=lab",
        "--time=1:00:00", "--requeue", "--exclusive",
    } <= asked
    assert not any("gpus" in line for line in asked)
    assert '--cpus-per-task="${SLURM_CPUS_PER_TASK:-3}"' in script, "a step does not inherit the job's"
    on_devices = directives(write("parallel.dp=2", "parallel.tp=8", "engine.device=cuda"))
    assert {"--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8"} <= on_devices
    assert not any("gpus-per-task" in line for line in on_devices)


@pytest.mark.parametrize(
    ("dp", "tp", "expected"), [(1, 1, 1), (2, 8, 8), (4, 2, 8), (72, 1, 8), (6, 1, 6), (2, 16, 16), (3, 4, 4)]
)
def test_ranks_of_a_node_are_whole_tp_groups(dp: int, tp: int, expected: int) -> None:
    config = load_config(None, [f"parallel.dp={dp}", f"parallel.tp={tp}"])
    assert ranks_per_node(config, None) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [(0, "ranks per node = 0: expected 1..12"), (3, "tp = 2 must divide it"), (8, r"must divide dp \* tp = 12")],
)
def test_uneven_nodes_are_refused(given: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ranks_per_node(load_config(None, ["parallel.dp=6", "parallel.tp=2"]), given)


class Job:
    """One run of a generated script among the stand-ins."""

    def __init__(self, folder: Path, root: Path, fake: Mapping[str, str] = NOTHING, *, requeue: bool = False) -> None:
        self.folder = folder / "notes"
        self.folder.mkdir()
        options = SlurmOptions(ranks_per_node=2, python=str(install(folder)), requeue=requeue)
        script = folder / "job.sbatch"
        script.write_text(write(*FOUR_RANKS, options=options))
        env = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_SECRET"} | {
            "PATH": f"{folder}:{os.environ['PATH']}", "FAKE_DIR": str(self.folder), "FAKE_ROOT": str(root),
            "FAKE_WORKERS": "4", "SLURMD_NODENAME": "node1", "SLURM_JOB_ID": "7", "LOCKSTEP_SLURM_PATIENCE_S": "5",
            "TMPDIR": str(folder), **fake,
        }
        self.process = subprocess.Popen(
            ["bash", str(script), "--prompts", "p.jsonl"], env=env, stderr=subprocess.PIPE, text=True, cwd=folder
        )

    def wait(self) -> tuple[int, str]:
        errors = self.process.communicate(timeout=30)[1]
        return self.process.returncode, errors

    def note(self, name: str) -> Any:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def await_note(self, name: str) -> None:
        while self.note(name) is None:
            time.sleep(0.02)


def test_every_task_reads_its_own_rank_and_the_controller_is_no_task(tmp_path: Path, root: Path) -> None:
    job = Job(tmp_path, root)
    assert job.wait() == (0, "")
    workers = [job.note(f"worker{rank}") for rank in range(4)]
    check_world(
        [
            RankEnv(
                rank=note["rank"], node_rank=note["node"], local_rank=note["local"], world_size=4, num_nodes=2,
                local_world_size=2, source=note["source"],
            )
            for note in workers
        ],
        num_ranks=4,
    )
    controller = job.note("controller")
    assert {note["source"] for note in workers} == {"slurm"}
    assert controller["ppid"] == job.process.pid
    assert controller["ppid"] not in {note["step_pid"] for note in workers}
    assert len({note["secret"] for note in [*workers, controller]}) == 1
    assert len(controller["secret"]) == 64
    assert controller["args"][-2:] == ["--prompts", "p.jsonl"]
    assert workers[0]["args"][-2:] == ["--controller", "127.0.0.1:4711"]
    assert all("--set parallel.tp=2" in " ".join(note["args"]) for note in [*workers, controller])
    assert not list(tmp_path.glob("tmp.*"))  # the folder of the address is gone


@pytest.mark.parametrize(
    ("fake", "code"),
    [
        ({"FAKE_CONTROLLER_CODE": "69"}, 69),
        ({"FAKE_CONTROLLER_CODE": "78", "FAKE_WORKER_CODE": "78"}, 78),
        ({"FAKE_WORKER_CODE": "70"}, 70),
    ],
)
def test_the_job_ends_with_the_controllers_code_and_never_0_after_a_fault(
    tmp_path: Path, root: Path, fake: dict[str, str], code: int
) -> None:
    assert Job(tmp_path, root, fake).wait()[0] == code


def test_a_controller_without_an_address_starts_no_task(tmp_path: Path, root: Path) -> None:
    job = Job(tmp_path, root, {"FAKE_NO_ADDRESS": "1", "FAKE_CONTROLLER_CODE": "2"})
    code, errors = job.wait()
    assert code == 2
    assert errors == "lockstep: error: no address of the controller after 5 s or before it ended (exit code 2)\n"
    assert job.note("worker0") is None


def test_a_temporary_failure_is_queued_again_where_asked(tmp_path: Path, root: Path) -> None:
    job = Job(tmp_path, root, {"FAKE_CONTROLLER_CODE": "75"}, requeue=True)
    assert job.wait()[0] == 75
    assert (job.folder / "requeued").read_text() == "7"


def test_a_signal_to_the_script_reaches_the_controller(tmp_path: Path, root: Path) -> None:
    job = Job(tmp_path, root, {"FAKE_STAY": "1"})
    for rank in range(4):
        job.await_note(f"worker{rank}")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait()[0] == 0
    assert job.note("stopped") is not None


def test_the_command_prints_a_script_that_bash_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--time", "10", "--srun=--overlap", "--output", "o.log"]
    assert run_command(["slurm", "--set", "parallel.tp=2", *options]) == 0
    script = capsys.readouterr().out
    assert {"--time=10", "--output=o.log", "--ntasks=2"} <= directives(script)
    assert '--export=ALL --overlap \\' in script
    assert not re.search(r"@[a-z_]+@", script)  # every place was filled
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert run_command(["slurm", "--set", "parallel.tp=2", "--ranks-per-node", "3"]) == 2
    assert "ranks per node = 3" in capsys.readouterr().err


def test_the_template_is_part_of_the_package(root: Path) -> None:
    with (root / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    assert any(TEMPLATE.match(pattern) for pattern in data["launch.slurm"])
