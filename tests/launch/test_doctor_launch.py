"""Doctor over a whole launch: rank 0 collects over real connections, all get one verdict, reports are read strictly."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from launch.doctor_launch import Report, Verdict, collect, folded, judge, report_to
from launch.doctor_report import Finding, blocking, ok, warning
from launch.rank_env import RankEnv
from runtime.cluster.line import LineError, connect_line

SECRET = b"a secret of these tests"


def report(rank: int, world_size: int = 3, *findings: Finding, **facts: str) -> Report:
    env = RankEnv(
        rank=rank, world_size=world_size, local_rank=0, local_world_size=1, node_rank=rank, num_nodes=world_size,
        source="slurm", host=f"host{rank}",
    )
    return Report(env=env, facts={"mtu": "1500", **facts}, findings=findings)


def meet(
    *reports: Report, num_ranks: int = 3, timeout_s: float = 20.0, before: Callable[[int], None] | None = None
) -> tuple[list[Verdict], list[Report], list[Finding]]:
    """The first one collects, the others report to it. `before` is called with the port, when it listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(8) as pool:
        port = listener.getsockname()[1]
        others = [
            pool.submit(report_to, other, "127.0.0.1", port, secret=SECRET, timeout_s=20.0) for other in reports[1:]
        ]
        if before is not None:
            pool.submit(before, port)
        verdict, here, findings = collect(
            reports[0], listener, secret=SECRET, num_ranks=num_ranks, may_differ=(), timeout_s=timeout_s
        )
        return [verdict, *(other.result() for other in others)], here, findings


def test_a_fit_launch() -> None:
    verdicts, here, findings = meet(*(report(rank, 3, warning("net.mtu", "1500", "more")) for rank in (0, 2, 1)))
    assert verdicts == [Verdict(code=0, text="")] * 3
    assert [r.env.rank for r in here] == [0, 1, 2]
    assert [(f.id, f.status) for f in findings] == [("launch.world", "ok"), ("launch.alike", "ok")]
    assert [f.found for f in folded(here)] == ["[r0-2] 1500"]


def test_nodes_that_differ_are_shown_to_all() -> None:
    verdicts, _, findings = meet(report(0), report(1, mtu="9000"), report(2))
    assert len(set(verdicts)) == 1
    assert verdicts[0].code == 1
    assert verdicts[0].text.startswith("launch.alike: the processes of this launch differ in 1 thing:")
    assert "9000   [r1]" in findings[1].found


def test_a_node_that_is_not_fit_blocks_the_launch() -> None:
    verdicts, here, _ = meet(report(0), report(1, 3, blocking("memory.fit", "too much", "less")), report(2))
    assert verdicts == [Verdict(code=1, text="memory.fit: too much")] * 3
    assert folded(here) == [blocking("memory.fit", "[r1] too much", "less")]


def test_the_same_rank_twice_ends_at_once_for_all() -> None:
    verdicts, _, findings = meet(report(0), report(1), report(1), num_ranks=3)
    assert {verdict.code for verdict in verdicts} == {1}
    assert "SLURM_PROCID = 1 twice" in findings[0].found
    assert "SLURM_PROCID = 1 twice" in verdicts[2].text


def test_ranks_that_do_not_come_are_named() -> None:
    verdicts, _, findings = meet(report(0), report(2), timeout_s=1.0)
    assert {verdict.code for verdict in verdicts} == {1}
    assert "[r1] did not come" in findings[0].found


def test_a_stranger_is_turned_away_and_told_of() -> None:
    def stranger(port: int) -> None:
        with suppress(LineError):
            connect_line("127.0.0.1", port, secret=b"another secret altogether", role="doctor", timeout_s=5.0)

    verdicts, here, findings = meet(report(0), report(1), timeout_s=1.5, before=stranger)
    assert [r.env.rank for r in here] == [0, 1]
    assert "secret" in findings[0].found
    assert verdicts[1].code == 1


def test_reports_are_read_strictly() -> None:
    good = report(0, 3, ok("a", "b"))
    assert Report.decode(good.encode()).env == good.env
    values = json.loads(good.encode())
    spoilt = [
        {}, [], values | {"more": 1}, values | {"env": {}}, values | {"env": values["env"] | {"rank": "0"}},
        values | {"facts": {"a": 1}}, values | {"findings": [{}]},
    ]
    for each in spoilt:
        with pytest.raises(ValueError, match=r"form|rank|expected"):
            Report.decode(json.dumps(each).encode())


def test_clocks_are_those_seen_from_rank_0() -> None:
    here = Report.decode(report(0).encode())
    late = replace(here, env=report(1).env, facts={**here.facts, "clock offset": "+9.0 s"})
    assert "clock offset" in judge([here, late], num_ranks=2)[1].found


def test_as_processes(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def start(rank: int, *more: str) -> subprocess.Popen[str]:
        env: Mapping[str, str] = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": str(root)}
        return subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "doctor", "--address", "127.0.0.1", "--set", "parallel.tp=2",
             "--set", "engine.max_num_seqs=" + ("8" if more else "16"), "--meet", f"127.0.0.1:{port}"],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root,
        )

    ranks = [start(0), start(1, "other")]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    table = outputs[0][0]
    assert "config engine.max_num_seqs  16" in table
    assert "[r1]" in table
    assert "dispatch capacity" in table
    assert outputs[1][0] == ""
    assert "launch.alike" in outputs[1][1]
