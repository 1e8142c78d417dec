"""The commands over several ranks: the ids of one process, and one line on stderr for whatever goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from launch.cli import run_command
from launch.config import BUILT_IN
from launch.deployment import start
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.rank_channel import RankChannel
from tests.launch.dying import children, is_running, segments, wait_until
from tests.runtime.driving import ask

PROMPTS = ["def main():\n", "The king said", "Return the"]
NORM = "model.layers.2.input_layernorm.weight"


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[Any], str]:
    code = run_command(["generate", "--json", *args])
    captured = capsys.readouterr()
    return code, [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_ids_are_those_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*PROMPTS, "--max-tokens", "12", "--ignore-eos", "--draft-tokens", "1"]
    alone = run_json(capsys, *args)
    ranks = run_json(capsys, *args, "--tp", "2", "--split")
    assert (ranks[0], ranks[2]) == (alone[0], alone[2]) == (0, "")
    assert [line["token_ids"] for line in ranks[1][:-1]] == [line["token_ids"] for line in alone[1][:-1]]
    assert children() == []
    assert segments() == []


def test_debug_mode_compares_the_collectives_of_every_step(minnow: Path) -> None:
    config = EngineConfig(model=minnow, dp=2, max_model_len=64, debug=True)
    engine = Engine(config, deployment=start(config))
    engine.submit(ask("a", [5, 6, 7], max_tokens=9))
    while engine.has_work():
        engine.step()
    channel = engine._channel
    assert isinstance(channel, RankChannel)
    assert channel.num_compared_steps > 3
    engine.close()


def test_bench_decode(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--batch", "2", "--prompt-len", "8", "--output-len", "6", "--repeat", "1", "--json", "--dp", "2"]
    assert run_command(["bench", "decode", *args]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert (figures["tp"], figures["dp"], figures["split"], figures["batch"]) == (1, 2, "auto", 2)
    assert figures["decode_tokens_per_s"] > 0
    assert captured.err == ""
    whole = (BUILT_IN.parent / "minnow" / "model.safetensors").stat().st_size
    assert len(figures["weight_bytes_read"]) == 2
    assert all(0.5 * whole < size < 0.9 * whole for size in figures["weight_bytes_read"]), "each reads half the experts"


def test_a_missing_tensor_is_one_line(capsys: pytest.CaptureFixture[str], minnow: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(minnow, model)
    tensors = load_file(model / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, model / "model.safetensors")
    code, lines, err = run_json(capsys, "x", "--tp", "2", "--set", f"model.path={model}")
    assert (code, lines, err.count("\n")) == (2, [], 1)
    assert err.startswith("lockstep: error: rank ")
    assert f"tensor {NORM} is missing" in err


def test_a_layout_that_does_not_divide_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "x", "--tp", "3") == (
        2, [], "lockstep: error: tp = 3 does not divide num_attention_heads = 8\n"
    )


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta"])
def test_a_device_that_is_not_here_is_one_line(capsys: pytest.CaptureFixture[str], device: str) -> None:
    assert run_json(capsys, "x", "--tp", "2", "--set", f"engine.device={device}") == (
        2, [], f"lockstep: error: device = '{device}': expected cpu, or an accelerator of this machine\n"
    )


def running_command(root: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """`lockstep generate --tp 2` that has begun to generate, and its ranks."""
    command = [*PROMPTS[:2], "--tp", "2", "--ignore-eos", "--max-tokens", "2000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "generate", *command], cwd=root, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(root)},
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stdout.read(20)
    ranks = children(process.pid)
    assert len(ranks) == 2
    return process, ranks


def test_a_killed_rank_ends_the_command_with_a_line_for_every_prompt(root: Path) -> None:
    process, ranks = running_command(root)
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    lines = err.splitlines()
    assert len(lines) == 2
    for prompt, line in enumerate(lines):
        expected = f"lockstep: error: prompt {prompt}: rank 1 (dp 0, tp 1) was killed by SIGKILL in phase '"
        assert line.startswith(expected)
    assert not any(map(is_running, ranks))


def test_an_interrupt_ends_ranks_and_command_without_a_traceback(root: Path) -> None:
    process, ranks = running_command(root)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everybody
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert wait_until(lambda: not any(map(is_running, ranks)), 5)
