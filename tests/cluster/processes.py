"""Which processes belong to a cluster under test, and which of them is the rank, the spare or the relay."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

MARK = "LOCKSTEP_FAULTS_MARK"
_WORKER = [b"-m", b"launch.worker"]
_SERIAL = re.compile(r"--process=(\d+)")
_RANK_MODULES = ("rank_epochs", "faulty_rank", "fake_cluster_rank")


def marked(mark: str) -> list[int]:
    """Processes, zombies left out, whose environment has MARK=mark: whatever was started with it."""
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid in _all() if pid != os.getpid() and wanted in _read(pid, "environ").split(b"\0")]


def children(pid: int) -> list[int]:
    return [child for listing in Path(f"/proc/{pid}/task").glob("*/children") for child in _pids(listing)]


def command(pid: int) -> str:
    """The command line; "" for a zombie or a process that is gone."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def keeper_of(worker: int) -> int | None:
    """The keeper that a worker is, or that a launcher in its place has started."""
    found = [pid for pid in (worker, *children(worker)) if _read(pid, "cmdline").split(b"\0")[1:3] == _WORKER]
    return found[0] if found else None


def rank_of(keeper: int) -> int | None:
    """The rank process of a keeper that takes part: the oldest one, since a spare only follows when that has ended."""
    found = []
    for pid in children(keeper):
        line = command(pid)
        serial = _SERIAL.search(line)
        if serial is not None and any(module in line for module in _RANK_MODULES):
            found.append((int(serial[1]), pid))
    return min(found)[1] if found else None


def has_spare(keeper: int) -> bool:
    """Whether a spare is warm: it has imported its libraries, and listens for the exchanges of other ranks."""
    rank = rank_of(keeper)
    ranks = [pid for pid in children(keeper) if _SERIAL.search(command(pid)) is not None and pid != rank]
    return any(_listens(pid) for pid in ranks)


def relay_of(keeper: int) -> int | None:
    return next((pid for pid in children(keeper) if "relay_main" in command(pid)), None)


def is_running(pid: int) -> bool:
    """Whether a process is there, and not merely unreaped."""
    return _read(pid, "stat").rpartition(b")")[2].split()[:1] not in ([], [b"Z"])


def segments() -> list[str]:
    """Shared memory with a name, of ours."""
    shm = Path("/dev/shm")
    return sorted(path.name for path in shm.iterdir() if "lockstep" in path.name) if shm.is_dir() else []


def _listens(pid: int) -> bool:
    """Whether a process has a TCP socket that listens."""
    lines = (_read(pid, "net/tcp") + _read(pid, "net/tcp6")).decode().splitlines()
    listening = {f"socket:[{fields[9]}]" for line in lines if (fields := line.split())[3] == "0A"}
    found = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(entry))
    return bool(found & listening)


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _pids(listing: Path) -> list[int]:
    try:
        return [int(pid) for pid in listing.read_text().split()]
    except OSError:
        return []
