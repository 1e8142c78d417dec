"""Whether another process of this machine still runs: zombies are dead, and a pid that was given anew is not it."""

from __future__ import annotations

import os
from dataclasses import dataclass

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
        if not fields:
            return _state_by_signal(self.pid)
        return fields[STATE_FIELD] if int(fields[START_FIELD]) == self.start else "X"

    def is_alive(self) -> bool:
        """False for a zombie too."""
        return self.state() not in DEAD_STATES


def _stat_fields(pid: int) -> list[str]:
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # every wait comes here 20 times a second: no layers
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        text = os.read(file, 4096).decode(errors="replace")
    except ProcessLookupError:
        return []
    finally:
        os.close(file)
    return text[text.rindex(")") + 1 :].split()  # the command itself may hold spaces and parentheses


def _state_by_signal(pid: int) -> str:
    """Where /proc is missing or hides other users' processes."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X"
    except PermissionError:
        pass
    return "S"
