"""The command line itself: spelling of flags, nearest matches, exit codes, one line on stderr and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.cli import app, run_command


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "--max-token", "3"], "No such option: --max-token (Possible options: "),
        (["generte"], "No such command 'generte'. Did you mean 'generate'?"),
        (["generate", "x", "--max-tokens", "-1"], "max_tokens = -1: expected an integer >= 1"),
        (["generate", "x", "--max_tokens=-1"], "max_tokens = -1: expected an integer >= 1"),
        (["generate", "x", "--temperature", "warm"], "Invalid value for '--temperature'"),
        (["generate", "x", "--top-p", "0"], "top_p = 0.0: expected a number in (0, 1]"),
        (["generate", "x", "--config", "nope.toml"], "nope.toml: no such configuration file"),
        (["generate", "--prompts", "nope.jsonl"], "nope.jsonl: no such prompts file"),
        (["generate", "x", "--set", "engine.thread=1"], "--set: unknown key 'engine.thread': did you mean 'threads'?"),
        (["generate", "x", "--draft-tokens", "-1"], "draft_tokens = -1: expected an integer >= 0"),
        (["generate", "x", "--draft-tokens", "99"], "draft_tokens = 99: expected an integer in [0, 16]"),
        (["generate", "x", "--set", "engine.device=gpu"], "device = 'gpu': expected cpu, or an accelerator"),
        (["generate", "x", "--set", "engine.device=cuda:99"], "device = 'cuda:99': expected cpu, or an accelerator"),
        (["bench", "verify", "--max-tokens", "0"], "max_tokens = 0: expected an integer >= 1"),
        (["generate", "x", "--set", "model.path=nowhere"], "nowhere"),
        (["bench", "schedule", "--requests", "0"], "requests = 0: expected an integer >= 1"),
        (["bench", "decode", "--batch", "0"], "batch = 0: expected an integer >= 1"),
        (["bench", "decode", "--prompts", "zeros"], "prompts = 'zeros': expected one of random, repeat, succ"),
        (["bench", "verify", "--context", "0"], "context = 0: expected 1..2040"),
    ],
)
def test_a_mistake_is_exit_code_2_and_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert run_command(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lockstep: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_an_unexpected_failure_is_exit_code_1_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise AssertionError("books\ndisagree")

    monkeypatch.setattr("launch.generate.run", fail)
    assert run_command(["generate", "x"]) == 1
    line = capsys.readouterr().err
    assert line == "lockstep: error: AssertionError: books disagree (`lockstep --traceback ...` shows where)\n"
    assert run_command(["--traceback", "generate", "x"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_lists_the_commands_and_flags() -> None:
    runner = CliRunner()
    assert all(name in runner.invoke(app, ["--help"]).output for name in ("generate", "bench", "--version"))
    flags = runner.invoke(app, ["generate", "-h"]).output
    for name in ("prompts", "config", "set", "draft-tokens", "max-tokens", "temperature", "top-p", "top-k", "json"):
        assert f"--{name}" in flags
    assert all(name in runner.invoke(app, ["bench", "--help"]).output for name in ("schedule", "decode", "verify"))


@pytest.mark.parametrize("args", [[], ["bench"]])
def test_without_a_command_the_help_is_shown_as_it_is(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert run_command(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(" ".join(["Usage: lockstep", *args]))
    assert captured.err.count("\n") > 5


def test_version_names_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lockstep ")


@pytest.mark.parametrize("spelling", ["--draft-tokens", "--draft_tokens"])
def test_bench_schedule_in_json(capsys: pytest.CaptureFixture[str], spelling: str) -> None:
    assert run_command(["bench", "schedule", "--requests", "5", "--steps", "3", spelling, "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["draft_tokens"]) == (5, 2)
    assert min(figures[name] for name in ("schedule_us_p50", "encode_us_p50", "plan_bytes")) > 0


def test_plan_size_does_not_depend_on_sequence_length(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for prompt_len in ("20", "4020"):  # the same place within a page, so that equally many pages are granted
        args = ["bench", "schedule", "--requests", "4", "--steps", "5", "--prompt-len", prompt_len, "--json"]
        assert run_command(args) == 0
        sizes.append(json.loads(capsys.readouterr().out)["plan_bytes"])
    assert sizes[0] == sizes[1]


def lockstep(root: Path, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", *args], cwd=root, input=stdin, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(root)}, timeout=120,
    )


def test_as_a_process_it_is_quiet_about_mistakes(root: Path) -> None:
    done = lockstep(root, "generate", "--prompts", "-", "--json", stdin="\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lockstep: error: no prompt: none on the command line and none in -\n"


def test_text_that_the_terminal_cannot_show_does_not_end_the_run(root: Path) -> None:
    rows = '{"id": "\\ud800", "prompt": "x"}\n{"id": "\u4f60", "prompt": "y"}\n'
    for encoding in ("ascii", "utf-8"):
        done = subprocess.run(
            [sys.executable, "-m", "launch.cli", "generate", "--prompts", "-", "--max-tokens", "1"], cwd=root,
            input=rows.encode(), capture_output=True, check=False, timeout=120,
            env=os.environ | {"PYTHONPATH": str(root), "PYTHONIOENCODING": encoding},
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.startswith(b"--- \\ud800 --- x\n")
        assert b"--- \\u4f60 --- y" in done.stdout or "--- \u4f60 --- y".encode() in done.stdout


def test_prompts_come_from_a_pipe(root: Path) -> None:
    reader, writer = os.pipe()  # what a shell makes of `--prompts <(...)`
    with open(writer, "w") as pipe:
        pipe.write('{"prompt": "hello"}\n')
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "generate", "first", "--prompts", f"/dev/fd/{reader}", "--max-tokens", "1",
         "--json"], cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120,
        pass_fds=(reader,), env=os.environ | {"PYTHONPATH": str(root)},
    )
    os.close(reader)
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line).get("id") for line in done.stdout.splitlines()] == ["0", "1", None]
