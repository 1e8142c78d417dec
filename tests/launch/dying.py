"""Runs an engine whose ranks have a fault, and says what became of the requests, how fast, and what was left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.deployment import start
from runtime.channel import RankFailure
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.request import FinishReason, GenerateRequest, SamplingParams

NUM_REQUESTS = 3


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`errors`: of each request, or the one error of a start that failed. `seconds`: from the fault to the error."""

    errors: list[str]
    seconds: float
    processes_left: list[int]


def run_with_fault(config: EngineConfig, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Prefill and decode a few requests over ranks of tests/launch/faulty_rank.py; every request must end."""
    moment = folder / "moment"
    moment.unlink(missing_ok=True)
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULT_TIME", str(moment))
    errors = _errors(config)
    assert moment.exists(), f"no fault came about: {errors}"
    seconds = time.monotonic() - float(moment.read_text())
    return Outcome(errors=errors, seconds=seconds, processes_left=children())


def _errors(config: EngineConfig) -> list[str]:
    try:
        engine = Engine(config, deployment=start(config, module="tests.launch.faulty_rank"))
    except RankFailure as failure:
        return [str(failure)]
    try:
        for i in range(NUM_REQUESTS):
            prompt = tuple(range(3 + i, 30 + i))
            sampling = SamplingParams(max_tokens=40, ignore_eos=True)
            engine.submit(GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
        ended = []
        while engine.has_work():
            ended += [chunk for chunk in engine.step() if chunk.finish_reason is not None]
        assert [chunk.finish_reason for chunk in ended] == [FinishReason.ERROR] * NUM_REQUESTS, ended
        return [chunk.error or "" for chunk in ended]
    finally:
        engine.close()


def children(pid: int | str = "self") -> list[int]:
    """Processes started by `pid` that are there, zombies included."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, listing.read_text().split())
    return [child for child in found if "resource_tracker" not in _command(child)]


def is_running(pid: int) -> bool:
    """Whether a process is there and not merely unreaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `condition` came true within `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def segments() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "lockstep" in name]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
