"""Whether another process of this machine still runs: zombies are dead, and a pid that was given anew is not it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DEAD_STATES = frozenset("ZX")  # ended but not yet waited for (a child of the controller), being removed
STATE_FIELD, START_FIELD = 0, 19  # of /proc/<pid>/stat, counted after the command's closing parenthesis


@dataclass(frozen=True)
class ProcessId:
    """A process by pid and start time (clock ticks since boot; 0 where there is no /proc): pids are given anew."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this pid now."""
        fields = _stat_fields(pid)
        return cls(pid, int(fields[START_FIELD]) if fields else 0)

    def state(self) -> str:
        """The kernel's letter (R runs, S sleeps, T is stopped, ...); "X" if it is gone or the pid is another's."""
        fields = _stat_fields(self.pid)
        if fields:
            return fields[STATE_FIELD] if int(fields[START_FIELD]) == self.start else "X"
        return "X" if _has_proc() else _state_by_signal(self.pid)

    def is_alive(self) -> bool:
        """False for a zombie too."""
        return self.state() not in DEAD_STATES


def _stat_fields(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return []
    return text[text.rindex(")") + 1 :].split()  # the command itself may hold spaces and parentheses


def _has_proc() -> bool:
    return Path("/proc/self/stat").exists()


def _state_by_signal(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X"
    except PermissionError:
        pass
    return "S"
