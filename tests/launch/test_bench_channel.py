"""`bench channel`: the figures, and that its reader processes are gone when it returns."""

from __future__ import annotations

import json

import pytest

from launch.cli import run_command


@pytest.mark.parametrize("interval_us", [0, 1000])
def test_figures_in_json(capsys: pytest.CaptureFixture[str], interval_us: int) -> None:
    args = ["--readers", "2", "--bytes", "1000", "--messages", "20", "--interval-us", str(interval_us), "--json"]
    assert run_command(["bench", "channel", *args]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["readers"] == 2
    assert figures["bytes"] == 1000
    assert figures["messages"] == 20
    assert 0 < figures["p10_us"] <= figures["p50_us"] <= figures["p99_us"] <= figures["max_us"]
    assert figures["send_p50_us"] < figures["p50_us"]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--readers", "0", "readers = 0: expected an integer >= 1"),
        ("--readers", "65", "ring 'bench' has 65 readers: expected 1..64"),
        ("--bytes", "-1", "bytes = -1: expected an integer >= 0"),
        ("--messages", "0", "messages = 0: expected an integer >= 1"),
        ("--interval-us", "-1", "interval-us = -1: expected an integer >= 0"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], option: str, value: str, said: str) -> None:
    assert run_command(["bench", "channel", option, value]) == 2
    assert said in capsys.readouterr().err
