"""`lockstep doctor --meet HOST:PORT` in every process of a launch: rank 0 collects what all found, and judges."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from launch.cluster_address import format_address
from launch.doctor_report import Finding, blocking, exit_code, from_json, ok, worst
from launch.preflight import arrived, compare, stamp
from launch.rank_env import RankEnv, check_some, check_world, rank_set
from runtime.cluster.line import FrameLine, LineError, accept_line, connect_line

ROLE, REPORT, VERDICT = "doctor", 0x4452, 0x4456
HANDSHAKE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one process of a launch has to say."""

    env: RankEnv
    facts: Mapping[str, str]
    findings: Sequence[Finding]

    def encode(self) -> bytes:
        return json.dumps({
            "env": asdict(self.env), "facts": stamp(self.facts), "findings": [asdict(f) for f in self.findings],
        }).encode()

    @classmethod
    def decode(cls, data: bytes) -> Report:
        """Facts with the sender's clock as seen from here. Raises ValueError."""
        values = json.loads(data)
        if not isinstance(values, dict) or set(values) != {"env", "facts", "findings"}:
            raise ValueError("a report of another form")
        env, facts = values["env"], values["facts"]
        if not isinstance(env, dict) or set(env) != {field.name for field in fields(RankEnv)}:
            raise ValueError("a report without a rank")
        if not all(isinstance(env[name], str if name in ("source", "host") else int) for name in env):
            raise ValueError("a report with a rank of another form")
        if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
            raise ValueError("a report with facts of another form")
        return cls(env=RankEnv(**env), facts=arrived(facts), findings=from_json(values["findings"]))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of the whole launch. `text`: one line, "" when nothing blocks."""

    code: int
    text: str


def collect(
    own: Report, listener: socket.socket, *, secret: bytes, num_ranks: int, may_differ: Sequence[str], timeout_s: float
) -> tuple[Verdict, list[Report], list[Finding]]:
    """In rank 0: wait for all others, judge, and tell them. `listener` stays the caller's.

    Returns the verdict, the reports that came, in order of rank, and the findings about the launch as a whole.
    """
    lines: list[FrameLine] = []
    reports = [own]
    try:
        wanted, deadline = max(own.env.world_size, num_ranks), time.monotonic() + timeout_s
        trouble = _receive(reports, lines, listener, secret, wanted, num_ranks, deadline)
        reports.sort(key=lambda report: report.env.rank)
        findings = judge(reports, num_ranks=num_ranks, may_differ=may_differ, trouble=trouble)
        verdict = _verdict(findings, reports)
        _tell(lines, verdict)
        return verdict, reports, findings
    finally:
        for line in lines:
            line.close()


def report_to(own: Report, host: str, port: int, *, secret: bytes, timeout_s: float) -> Verdict:
    """In every other rank: send, and wait for the verdict. Raises LineError when rank 0 cannot be reached."""
    line = connect_line(host, port, secret=secret, role=ROLE, timeout_s=timeout_s)
    try:
        line.send(REPORT, 0, own.encode())
        frame = line.wait(2 * timeout_s)[0]
        values: Any = json.loads(frame.body)
        return Verdict(code=int(values["code"]), text=str(values["text"]))
    except (ValueError, KeyError, TypeError) as error:
        return Verdict(code=1, text=f"the verdict of {format_address(host, port)} cannot be read: {error}")
    finally:
        line.close()


def judge(
    reports: Sequence[Report], *, num_ranks: int, may_differ: Sequence[str] = (), trouble: str = ""
) -> list[Finding]:
    """`launch.*` findings: who is here, whether they are one launch, whether they are alike."""
    findings = []
    try:
        check_world([report.env for report in reports], num_ranks=num_ranks)
        nodes = len({report.env.node_rank for report in reports})
        findings.append(ok("launch.world", f"{len(reports)} ranks on {nodes} nodes"))
    except ValueError as error:
        found = f"{error}; {trouble}" if trouble else str(error)
        findings.append(blocking("launch.world", found, "correct how ranks are started"))
    facts = {report.env.rank: report.facts for report in reports}
    differences = compare(facts, may_differ=may_differ)
    if differences is None:
        findings.append(ok("launch.alike", f"{len(reports[0].facts)} facts of {len(reports)} ranks"))
    else:
        advice = "make the nodes alike, or name in cluster.may_differ what may differ"
        findings.append(blocking("launch.alike", differences, advice))
    return findings


def folded(reports: Sequence[Report]) -> list[Finding]:
    """What ranks found wrong on their nodes, the same text once, with the ranks that found it."""
    holders: dict[Finding, list[int]] = {}
    for report in reports:
        for finding in report.findings:
            if finding.status in ("warning", "blocking"):
                holders.setdefault(finding, []).append(report.env.rank)
    return [
        Finding(id=f.id, status=f.status, found=f"{rank_set(ranks)} {f.found}", advice=f.advice)
        for f, ranks in holders.items()
    ]


def _receive(
    reports: list[Report], lines: list[FrameLine], listener: socket.socket, secret: bytes, wanted: int,
    num_ranks: int, deadline: float,
) -> str:
    """Fill `reports` until all are here, something cannot be one launch, or time is up; what else went wrong."""
    trouble = ""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(reports) < wanted and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, 0.2)):
                try:
                    if key.fileobj is listener:
                        connection, _address = listener.accept()
                        line, _role = accept_line(connection, secret=secret, timeout_s=HANDSHAKE_S)
                        lines.append(line)
                        selector.register(line, selectors.EVENT_READ, line)
                    else:
                        reports += [Report.decode(frame.body) for frame in key.data.receive()]
                except (LineError, ValueError) as error:
                    trouble = str(error)
                    if key.fileobj is not listener:
                        selector.unregister(key.fileobj)
            try:
                check_some([report.env for report in reports], num_ranks=num_ranks)
            except ValueError:
                break
    return trouble


def _verdict(findings: Sequence[Finding], reports: Sequence[Report]) -> Verdict:
    everything = [*findings, *(finding for report in reports for finding in report.findings)]
    if worst(everything) != "blocking":
        return Verdict(code=0, text="")
    first = next(finding for finding in everything if finding.status == "blocking")
    return Verdict(code=exit_code(everything), text=f"{first.id}: {first.found}")


def _tell(lines: Sequence[FrameLine], verdict: Verdict) -> None:
    for line in lines:
        with suppress(LineError):
            line.send(VERDICT, 0, json.dumps(asdict(verdict)).encode())
            deadline = time.monotonic() + 1.0
            while not line.flush() and time.monotonic() < deadline:
                time.sleep(0.01)
