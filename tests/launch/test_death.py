"""Deaths of ranks that run the model: every open request ends with one line naming rank and phase, within 5 seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.config import EngineConfig
from tests.launch.dying import NUM_REQUESTS, Outcome, children, is_running, run_with_fault, segments, wait_until
from tests.launch.forked_rank import fork_rank

LIMIT_S = 5.0
REPEATS = int(os.environ.get("DEATH_REPEATS", "20"))
STARTED = 2  # repeats whose ranks are started as users' ranks are; those of the others are forked from this process
HOW = {
    "SIGKILL": "was killed by SIGKILL",
    "SIGSTOP": "has shown no sign of life for 2.",
    "raise": "failed",
}


def check(outcome: Outcome, layout: tuple[int, int], rank: int, when: str, what: str) -> None:
    dp, tp = layout
    assert len(outcome.errors) == (1 if when == "start" else NUM_REQUESTS)
    for error in outcome.errors:
        assert error.startswith(f"rank {rank} (dp {rank // tp}, tp {rank % tp}) {HOW[what]}"), error
        assert "\n" not in error
        assert what != "raise" or error.endswith("KeyError: 'injected'")
        if when == "start":
            assert "of step" not in error
        else:
            assert "in phase 'target" in error, error
            assert f" of step {1 if when == 'prefill' else 3}" in error, error
    assert outcome.seconds < LIMIT_S
    assert outcome.processes_left == []
    assert segments() == []


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ((1, 2), "1:decode:inside:SIGKILL"),
        ((2, 1), "0:prefill:before:SIGSTOP"),
        ((1, 2), "1:start:loading:SIGKILL"),
    ],
)
def test_a_death_ends_every_open_request(
    minnow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[int, int], fault: str
) -> None:
    dp, tp = layout
    rank, when, _, what = fault.split(":")
    outcome = run_with_fault(EngineConfig(model=minnow, dp=dp, tp=tp), fault, tmp_path, monkeypatch)
    check(outcome, layout, int(rank), when, what)


@pytest.mark.slow
@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("what", HOW)
@pytest.mark.parametrize(
    ("when", "where"),
    [("start", where) for where in ("joining", "loading")]
    + [(when, where) for when in ("prefill", "decode") for where in ("before", "inside", "after")],
)
@pytest.mark.parametrize(("layout", "rank"), [((1, 2), 0), ((1, 2), 1), ((2, 1), 0), ((2, 1), 1)])
def test_every_death(
    minnow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[int, int], rank: int, when: str,
    where: str, what: str, repeat: int,
) -> None:
    dp, tp = layout
    fault = f"{rank}:{when}:{where}:{what}"
    if repeat >= STARTED:
        monkeypatch.setattr("launch.deployment._start_rank", fork_rank)
    outcome = run_with_fault(EngineConfig(model=minnow, dp=dp, tp=tp), fault, tmp_path, monkeypatch)
    with Path(os.environ.get("DEATH_LOG", os.devnull)).open("a") as log:
        print(what, fault, dp, tp, f"{outcome.seconds:.3f}", file=log)
    check(outcome, layout, rank, when, what)


@pytest.mark.slow
@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("stage", ["start", "decode"])
def test_every_death_of_the_controller(minnow: Path, root: Path, stage: str, repeat: int) -> None:
    """Its requests end with it; its ranks, which nobody tells, must end too and leave nothing."""
    controller = subprocess.Popen(
        [
            sys.executable, "-m", "launch.cli", "generate", "Once upon a time", "--set", f"model.path={minnow}",
            "--tp", "2", "--max-tokens", "1500", "--ignore-eos",
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert controller.stdout is not None
    try:
        assert wait_until(lambda: len(children(controller.pid)) == 2, 60)
        if stage == "decode":
            assert controller.stdout.read(1)
        ranks = children(controller.pid)
        time.sleep(0.04 * repeat)  # at another moment of the start, or of a step, each time
        assert all(map(is_running, ranks))
    finally:
        controller.kill()
        controller.wait()
        controller.stdout.close()
    assert wait_until(lambda: not any(map(is_running, ranks)), LIMIT_S), "ranks outlive their controller"
    assert segments() == []
