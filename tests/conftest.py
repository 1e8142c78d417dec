"""Shared fixtures, one thread per process, and the check that a session leaves nothing behind."""

from __future__ import annotations

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported anywhere
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHES = {".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "__pycache__"}


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> None:
    """A shell lets its background jobs ignore SIGINT, and their children too; some tests send it to theirs."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def minnow() -> Path:
    """The embedded model: 5 layers, MLA, 16 experts, one MTP layer, 4,096 tokens."""
    return ROOT / "configs" / "minnow"


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the session if a child process, a shared-memory segment of ours or a file in the checkout outlives it."""
    segments, files = _segments(), _files()
    yield
    left = [
        *(f"process {line}" for line in _children()),
        *(f"/dev/shm/{name}" for name in sorted(_segments() - segments)),
        *(str(path) for path in sorted(_files() - files)),
    ]
    assert not left, f"left behind by the tests: {left}"


def _segments() -> set[str]:
    shm = Path("/dev/shm")
    return {p.name for p in shm.iterdir() if "lockstep" in p.name} if shm.is_dir() else set()


def _files() -> set[Path]:
    """Where a test would drop a file by mistake: the top of the checkout and the configurations."""
    return {p for folder in (ROOT, ROOT / "configs", ROOT / "configs" / "minnow") for p in folder.iterdir()} - {
        ROOT / name for name in CACHES
    }


def _children() -> list[str]:
    """Live children of this process, with their command lines (Linux)."""
    found = []
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in listing.read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "multiprocessing.resource_tracker" not in command:  # lives as long as its parent, by design
                found.append(f"{pid}: {command}")
    return found
