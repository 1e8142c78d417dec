"""Checks of a configuration against its model: files, layout, capacity, and memory need against memory there."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.doctor_report import Finding, blocking, ok, skipped, warning
from launch.memory_need import MemoryNeed, memory_need

if TYPE_CHECKING:
    from launch.config import LaunchConfig
    from runtime.config import EngineConfig
    from runtime.models.config import ModelConfig

GIB = 1 << 30
SLACK = 0.02  # of the memory that is there: whoever else uses it may grow a little
_MAX_HEADER = 1 << 27


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes for each rank, and where that figure comes from."""

    per_rank: int
    source: str


def check_files(folder: Path) -> Finding:
    """Every file that the index names is here and as long as its own header says."""
    if not folder.is_dir():
        return blocking("model.files", f"{folder}: no such folder", "set model.path to the checkpoint on this node")
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    named = _shards_of(index) if index.is_file() else {path.name for path in shards}
    if isinstance(named, str):
        return blocking("model.files", f"{index}: {named}", "copy the file again")
    missing = sorted(named - {path.name for path in shards})
    if missing or not named:
        what = f"{', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}"
        advice = "copy the checkpoint again" if named else "set model.path to the checkpoint on this node"
        return blocking("model.files", f"{folder}: missing {what or 'any *.safetensors'}", advice)
    faults = [f"{path.name}: {fault}" for path in shards if (fault := _fault_of(path))]
    if faults:
        return blocking("model.files", "; ".join(faults[:3]), "copy these files again")
    total = sum(path.stat().st_size for path in shards)
    return ok("model.files", f"{len(shards)} files of weights, {_gib(total)}")


def check_tokenizer(folder: Path) -> Finding:
    if (folder / "tokenizer.json").is_file():
        return ok("model.tokenizer", "tokenizer.json")
    return warning("model.tokenizer", f"{folder} has no tokenizer.json", "requests then give and get token ids only")


def check_plan(
    config: LaunchConfig, memory: Memory | None, *, value_bytes: int | None = None
) -> Iterator[Finding]:
    """Layout, capacity and memory, as far as the model's `config.json` can be read."""
    from runtime.models.config import load_model_config

    try:
        engine = config.engine_config()
        model = load_model_config(engine.model)
    except (ValueError, FileNotFoundError) as error:
        yield blocking("config.engine", str(error), "correct the key that the message names")
        for name in ("config.layout", "config.capacity", "memory.fit"):
            yield skipped(name, "the model's configuration could not be read")
        return
    yield ok("config.engine", f"k = {engine.k}, schedule {'ahead' if engine.plans_ahead else 'settled'}")
    yield _check_layout(engine, model)
    yield _check_capacity(engine)
    yield check_memory(memory_need(engine, model, value_bytes=value_bytes), memory)


def _check_layout(engine: EngineConfig, model: ModelConfig) -> Finding:
    from runtime.models.shards import check_layout

    layout = engine.layout
    copies = f" and {engine.redundant_experts} copies" if engine.redundant_experts else ""
    shape = f"dp {layout.dp} x tp {layout.tp} = {layout.ep} ranks, {model.num_experts} experts{copies} over all of them"
    try:
        check_layout(model, layout, engine.redundant_experts)
    except ValueError as error:
        return blocking("config.layout", f"{shape}: {error}", "choose sizes that divide the model")
    return ok("config.layout", shape)


def _check_capacity(engine: EngineConfig) -> Finding:
    found = f"{engine.capacity} tokens a rank at once, a full batch takes {engine.least_capacity}"
    chunk = -(-engine.prefill_chunk_size // engine.tp)
    if engine.capacity < engine.least_capacity + chunk:
        return warning(
            "config.capacity", found,
            f"a prompt chunk of {engine.prefill_chunk_size} does not fit beside a full batch: set "
            f"parallel.dispatch_capacity to {engine.least_capacity + chunk} for full speed",
        )
    return ok("config.capacity", found)


def check_memory(need: MemoryNeed, memory: Memory | None) -> Finding:
    """What a rank needs against what it has; where it cannot fit, how much of that the KV pages are."""
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in need.parts().items() if 100 * size >= need.total)
    found = f"{_gib(need.total)} a rank ({parts})"
    if memory is None:
        return skipped("memory.fit", f"{found}; no accelerator to compare with: give --memory-gib")
    found = f"{found}; {_gib(memory.per_rank)} there ({memory.source})"
    room = int(memory.per_rank * (1 - SLACK))
    if need.total <= room:
        return ok("memory.fit", found)
    room_for_kv = room - (need.total - need.kv)
    if room_for_kv >= need.least_kv:
        return blocking(
            "memory.fit", found,
            f"set engine.kv_cache_bytes to at most {room_for_kv} ({_gib(room_for_kv)}), or engine.max_num_seqs lower",
        )
    return blocking(
        "memory.fit", found,
        f"without KV pages it is {_gib(need.total - need.kv)}: use more ranks, so that each holds fewer experts",
    )


def cpu_memory(local_ranks: int, meminfo: Path = Path("/proc/meminfo")) -> Memory | None:
    """An equal share of what the system says is available."""
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
            return Memory(per_rank=available // max(local_ranks, 1), source=f"1/{max(local_ranks, 1)} of this node's")
    return None


def _shards_of(index: Path) -> set[str] | str:
    """File names, or what is wrong with the index."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return {str(name) for name in names}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"cannot be read: {' '.join(str(error).split())[:80]}"


def _fault_of(path: Path) -> str:
    """What is wrong with the length of a safetensors file, "" when nothing is."""
    size = os.stat(path).st_size
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= min(_MAX_HEADER, size):
                return f"{size} bytes and no header"
            header: Any = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return f"cannot be read: {' '.join(str(error).split())[:80]}"
    expected = 8 + length + int(end)
    return "" if expected == size else f"{size} bytes, expected {expected}"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"
