"""What the faults of one kind came to: detection, interruption, and what must be zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.cluster.streams import Tally


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One fault. Seconds from it until the engine knew, until there were ranks again, and without a token for anybody;
    None: it never came to that."""

    target: str
    detection_s: float | None
    recovery_s: float | None
    interruption_s: float | None
    num_restarts: int
    message: str = ""


@dataclass(kw_only=True)
class Report:
    """All faults of one kind, and what was left."""

    kind: str
    layout: str
    incidents: list[Incident] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    orphans: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    exit_codes: dict[int, int] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """What is told; `num_undetected` and all below must be 0."""
        detected = [i.detection_s for i in self.incidents if i.detection_s is not None]
        interrupted = [i.interruption_s for i in self.incidents if i.interruption_s is not None]
        return {
            "kind": self.kind,
            "layout": self.layout,
            "num_faults": len(self.incidents),
            "detection_s": spread(detected),
            "recovery_s": spread([i.recovery_s for i in self.incidents if i.recovery_s is not None]),
            "interruption_s": spread(interrupted),
            "num_restarts": sum(i.num_restarts for i in self.incidents),
            "num_requests": self.tally.num_finished,
            "num_requests_restarted": self.tally.num_restarted,
            "num_undetected": len(self.incidents) - len(detected),
            "num_not_resumed": len(self.incidents) - len(interrupted),
            "num_failed_requests": len(self.tally.errors),
            "num_lost_tokens": self.tally.num_lost_tokens,
            "num_repeated_tokens": self.tally.num_repeated_tokens,
            "num_other_differences": len(self.tally.differences),
            "num_orphans": len(self.orphans),
            "num_segments_left": len(self.segments),
        }

    def details(self) -> dict[str, Any]:
        """The same, and every incident."""
        return {
            **self.figures(), "incidents": [asdict(incident) for incident in self.incidents],
            "differences": self.tally.differences, "errors": self.tally.errors[:20], "orphans": self.orphans,
            "segments": self.segments, "exit_codes": self.exit_codes,
        }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median and largest, in seconds."""
    if not values:
        return None
    ordered = sorted(values)
    return {"p50": round(ordered[len(ordered) // 2], 3), "max": round(ordered[-1], 3)}


def render(figures: dict[str, Any]) -> str:
    """For reading: a line a figure."""
    width = max(map(len, figures))

    def show(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {number:.2f}" for name, number in value.items())
        return "-" if value is None else str(value)

    return "\n".join(f"{name:<{width}}  {show(value)}" for name, value in figures.items())
