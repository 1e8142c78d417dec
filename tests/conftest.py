"""Shared fixtures, one thread per process, and the check that a session leaves nothing behind."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported anywhere
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHES = {".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "__pycache__"}
GENERATED = CACHES | {".venv", ".git", "build", "dist"}


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
    found: set[Path] = set()
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [s for s in subfolders if s not in GENERATED and not s.endswith(".egg-info")]
        found.update(Path(folder) / name for name in names)
    return found


def _children() -> list[str]:
    """Live processes whose parent is this one, without the `ps` that lists them."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,stat=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False
    )
    return [line.strip() for line in listed.stdout.splitlines() if " ps " not in f" {line} " and "ps -o" not in line]
