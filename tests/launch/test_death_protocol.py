"""Deaths of rank processes that run no model: each becomes one line naming rank and phase, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.deployment import start
from runtime.channel import RankFailure
from runtime.config import EngineConfig
from runtime.rank_watch import Patience
from tests.launch.dying import children, is_running, segments, wait_until
from tests.runtime.served_threads import empty_plan

MODULE = "tests.launch.fake_rank"


def config(minnow: Path, dp: int = 1, tp: int = 1) -> EngineConfig:
    return EngineConfig(model=minnow, dp=dp, tp=tp)


def failure(config: EngineConfig) -> str:
    """Start ranks, run steps until one fails, and check that nothing is left."""
    with pytest.raises(RankFailure) as caught:
        run_until_failure(config)
    assert children() == []
    assert segments() == []
    return str(caught.value)


def run_until_failure(config: EngineConfig) -> None:
    deployment = start(config, module=MODULE, patience=Patience(stall_s=1.0))
    try:
        deadline = time.monotonic() + 60
        for step in range(1, 1 << 30):
            deployment.channel.send([empty_plan(step)] * config.dp)
            deployment.channel.receive()
            assert time.monotonic() < deadline
    finally:
        deployment.channel.close()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("1:load:SIGKILL", "rank 1 (dp 1, tp 0) was killed by SIGKILL in phase 'loading weights'"),
        ("0:load:SIGSTOP", "rank 0 (dp 0, tp 0) has shown no sign of life for 1.0 s, last in phase 'loading weights'"),
        ("1:load:raise", "rank 1 (dp 1, tp 0) failed in phase 'loading weights': KeyError: 'not\\nthere'"),
        ("0:allocate:exit", "rank 0 (dp 0, tp 0) exited with code 7 in phase 'allocating'"),
        ("1:step:SIGSEGV", "rank 1 (dp 1, tp 0) was killed by SIGSEGV in phase 'target' of step 2"),
        ("0:step:raise", "rank 0 (dp 0, tp 0) failed in phase 'target' of step 2: KeyError: 'not\\nthere'"),
        ("1:step:lose", "rank 1 (dp 1, tp 0) failed in phase 'target: all_to_all on ep' of step 2: RuntimeError: Con"),
        ("1:step:spin", "rank 1 (dp 1, tp 0) hangs: it has not got on for 1."),
        ("1:step:hang", "no rank has got on for 4."),
        ("1:drafter:SIGSTOP", "rank 1 (dp 1, tp 0) has shown no sign of life for 1."),
    ],
)
def test_a_death_names_the_rank_and_its_phase(
    minnow: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setenv("FAKE_RANK", script)
    assert failure(config(minnow, dp=2)).startswith(message)


def test_a_mistake_in_the_model_is_the_users(minnow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_RANK", "1:load:refuse")
    with pytest.raises(ValueError, match=r"^rank 1 \(dp 0, tp 1\): tensor w is missing from model.safetensors$"):
        start(config(minnow, tp=2), module=MODULE)
    assert children() == []


def test_a_layout_that_does_not_divide_is_refused_before_anything_starts(minnow: Path) -> None:
    with pytest.raises(ValueError, match="tp = 3 does not divide num_attention_heads = 8"):
        start(config(minnow, tp=3), module="tests.launch.no_such_module")
    assert children() == []


def test_the_smallest_number_of_pages_counts(minnow: Path) -> None:
    deployment = start(config(minnow, tp=2), module=MODULE)  # the fake ranks assert what they are told
    deployment.channel.close()
    assert deployment.sizes.num_pages == 100
    assert children() == []


def test_a_rank_that_does_not_stop_is_killed_on_closing(minnow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_RANK", "1:close:hang")
    start(config(minnow, tp=2), module=MODULE).channel.close()
    assert children() == []


CONTROLLER = """
import sys, time
from pathlib import Path
from launch.deployment import start
from runtime.config import EngineConfig
start(EngineConfig(model=Path(sys.argv[1]), tp=3 - 1), module=sys.argv[2])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stage", ["loading", "ready"])
def test_ranks_end_with_a_controller_that_is_killed(minnow: Path, root: Path, stage: str) -> None:
    script = "1:load:hang" if stage == "loading" else "-1::"
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(minnow), MODULE], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(root), "FAKE_RANK": script},
    )
    assert controller.stdout is not None
    try:
        if stage == "ready":
            assert controller.stdout.readline() == b"ready\n"
        else:
            assert wait_until(lambda: len(children(controller.pid)) == 2, 60)
        ranks = children(controller.pid)
        assert len(ranks) == 2
        assert all(map(is_running, ranks))
    finally:
        controller.send_signal(signal.SIGKILL)
        controller.wait()
        controller.stdout.close()
    assert wait_until(lambda: not any(map(is_running, ranks)), 5), "ranks outlive their controller"
