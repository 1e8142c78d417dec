"""A model folder as seen from outside: which files it has, how large, and a digest of what is in each."""

from __future__ import annotations

import hashlib
from pathlib import Path

WHOLE_BYTES = 64 << 20  # larger files are sampled: reading 700 GB on every node would take longer than loading a share
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 64 << 10


def model_files(folder: Path) -> list[Path]:
    """Configuration, tokenizer and weights, by name."""
    return sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")])


def file_facts(folder: Path) -> dict[str, str]:
    """File name -> size and digest; one row that says so where the folder is missing or holds nothing."""
    if not folder.is_dir():
        return {"folder": "missing"}
    found: dict[str, str] = {}
    for path in model_files(folder):
        try:
            found[path.name] = f"{path.stat().st_size} bytes, {digest_of(path)}"
        except OSError as error:
            found[path.name] = f"unreadable: {error.strerror}"
    return found or {"folder": "no model files"}


def digest_of(path: Path) -> str:
    """Of the whole file up to 64 MiB; of 16 windows of 64 KiB, the first and the last included, beyond."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while block := file.read(1 << 20):
                digest.update(block)
            return digest.hexdigest()
        for index in range(_NUM_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{digest.hexdigest()} (sampled)"
