"""What a check found, and how it is shown: a table for people, JSON with stable ids for scripts."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "blocking", "skipped"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "blocking", "skipped")
SCHEMA = 1  # of the JSON; grows when a field changes its meaning
WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`id` is stable: scripts may rely on it. `advice`: what to change, "" where there is nothing to do."""

    id: str
    status: Status
    found: str
    advice: str = ""


def ok(id: str, found: str) -> Finding:
    return Finding(id=id, status="ok", found=found)


def skipped(id: str, why: str) -> Finding:
    return Finding(id=id, status="skipped", found=why)


def warning(id: str, found: str, advice: str) -> Finding:
    return Finding(id=id, status="warning", found=found, advice=advice)


def blocking(id: str, found: str, advice: str) -> Finding:
    return Finding(id=id, status="blocking", found=found, advice=advice)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 with warnings at most, 1 where something blocks."""
    return int(any(finding.status == "blocking" for finding in findings))


def to_json(findings: Sequence[Finding], *, node: str, more: Mapping[str, Any] | None = None) -> str:
    """One object: `schema`, `node`, `status` (the worst), `checks` in order."""
    return json.dumps(
        {"schema": SCHEMA, "node": node, "status": worst(findings), "checks": [asdict(f) for f in findings],
         **(more or {})}, indent=2,
    )


def from_json(values: Any) -> list[Finding]:
    """The findings in a list as `to_json` makes it. Raises ValueError for anything else."""
    if not isinstance(values, list):
        raise ValueError(f"checks: expected a list, got {type(values).__name__}")
    findings = []
    for value in values:
        fields = ("id", "status", "found", "advice")
        if not isinstance(value, dict) or set(value) != set(fields) or not all(
            isinstance(value[name], str) for name in fields
        ) or value["status"] not in STATUSES:
            raise ValueError(f"check {str(value)[:80]!r}: expected the texts {', '.join(fields)}")
        findings.append(Finding(**value))
    return findings


def worst(findings: Iterable[Finding]) -> Status:
    found = {finding.status for finding in findings}
    return next((status for status in ("blocking", "warning", "ok") if status in found), "skipped")


def table(findings: Sequence[Finding], *, width: int = WIDTH) -> str:
    """A line a finding, the advice below it, and a count at the end."""
    id_width = max((len(finding.id) for finding in findings), default=0)
    indent = " " * (len("blocking") + id_width + 4)
    lines: list[str] = []
    for finding in findings:
        head = f"{finding.status:<8}  {finding.id:<{id_width}}  "
        for paragraph in finding.found.splitlines() or [""]:
            lines += textwrap.wrap(
                paragraph, max(width, 60), initial_indent=head, subsequent_indent=indent, drop_whitespace=True,
                break_on_hyphens=False,
            ) or [head.rstrip()]
            head = indent
        if finding.advice:
            lines += textwrap.wrap(
                f"-> {finding.advice}", max(width, 60), initial_indent=indent, subsequent_indent=indent + "   ",
                break_on_hyphens=False,
            )
    counts = {status: sum(finding.status == status for finding in findings) for status in STATUSES}
    lines.append(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    return "\n".join(lines)
