"""Deaths of ranks that run the model: every open request ends with one line naming rank and phase, within 5 seconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.config import EngineConfig
from tests.launch.dying import NUM_REQUESTS, Outcome, run_with_fault, segments

LIMIT_S = 5.0
REPEATS = int(os.environ.get("DEATH_REPEATS", "20"))
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
    outcome = run_with_fault(EngineConfig(model=minnow, dp=dp, tp=tp), fault, tmp_path, monkeypatch)
    check(outcome, layout, rank, when, what)
