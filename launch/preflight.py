"""What all processes of a launch must have alike: the facts of each, and the table of those that differ."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from launch.model_files import file_facts
from launch.network import accelerators, device_of_route, interface_of, mtu_of, rdma_devices
from launch.rank_env import RankEnv, rank_set

if TYPE_CHECKING:
    from launch.config import LaunchConfig

CONTROLLER = -1  # in the place of a rank; it has no network device, environment or accelerator to compare
CLOCK_TOLERANCE_S = 2.0  # logs and certificates get confusing beyond; nothing in a step compares clocks of hosts
MAX_ROWS = 40

_PACKAGES = ("torch", "numpy", "safetensors", "msgpack")
_OWN = ("launch", "runtime", "mtp", "moe", "parallel")
_ENVIRONMENT = ("NCCL_", "NVSHMEM_", "GLOO_", "UCX_", "TORCH_NCCL_", "LOCKSTEP_", "OMP_", "HF_HUB_OFFLINE")
# Secrets are not shown, and what is of one process or one node by nature does not count.
_NOT_COMPARED = ("LOCKSTEP_SECRET", "LOCKSTEP_LAUNCHER", "LOCKSTEP_ADVERTISE", "LOCKSTEP_CONTROLLER", "LOCKSTEP_CONFIG")
_SHARED_SECTIONS = ("model", "engine", "parallel", "draft")
# May lie elsewhere on each node; the files of the model are compared.
_NODE_KEYS = ("model.path", "parallel.placement_file")
_CLOCK, _OFFSET = "clock", "clock offset"
_CONTROLLER_FACTS = ("lockstep", "version ", "config", "model ", "dispatch capacity")


def gather_facts(config: LaunchConfig, env: RankEnv | None, *, address: str | None = None) -> dict[str, str]:
    """Facts of this process by name; `env` is None in the controller. Nothing is refused here, only written down.

    `address`: the one that other ranks reach this one at; its interface is compared. None: the one with the default
    route. The clock is read last; renew it with `stamp` where the facts are sent later.
    """
    facts = {"lockstep": _own_version(), **{f"version {name}": _version(name) for name in _PACKAGES}}
    facts |= _config_facts(config)
    facts |= {f"model {name}": value for name, value in file_facts(Path(config.model.path)).items()}
    if env is not None:
        facts |= {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
        facts |= _environment_facts(os.environ)
        facts |= _device_facts(address)
    return stamp(facts)


def stamp(facts: Mapping[str, str]) -> dict[str, str]:
    """The same with this moment's wall clock: call it just before the facts are sent."""
    return {**facts, _CLOCK: f"{time.time():.3f}"}


def arrived(facts: Mapping[str, str], *, now: float | None = None) -> dict[str, str]:
    """The same with how far the sender's clock is ahead of ours (seconds) in the place of its clock.

    Call it on arrival, in one process for all: clocks that were read at different moments cannot be compared.
    """
    found = dict(facts)
    clock = found.pop(_CLOCK, None)
    if clock is not None:
        found[_OFFSET] = f"{float(clock) - (time.time() if now is None else now):+.1f} s"
    return found


def compare(facts: Mapping[int, Mapping[str, str]], *, may_differ: Sequence[str] = ()) -> str | None:
    """A table of just the facts that differ, with the ranks that hold each value; None when all is alike.

    Key -1 (`CONTROLLER`) may stand for the controller: only what it has is compared with the ranks. A fact that a rank
    lacks counts as a value of its own. `may_differ`: names, or beginnings of names, that do not count (`nic`).
    """
    ranks = sorted(facts)
    names = dict.fromkeys(name for rank in ranks for name in facts[rank])
    differing: list[tuple[str, dict[str, list[int]]]] = []
    for name in names:
        if name == _CLOCK or any(name.startswith(prefix) for prefix in may_differ):
            continue
        holders = _holders(name, facts)
        if name == _OFFSET and _within_tolerance(holders):
            continue
        if len(holders) > 1:
            differing.append((name, holders))
    return _table(differing) if differing else None


def _holders(name: str, facts: Mapping[int, Mapping[str, str]]) -> dict[str, list[int]]:
    """Value -> ranks that hold it, in order of rank."""
    holders: dict[str, list[int]] = {}
    for rank in sorted(facts):
        if rank == CONTROLLER and not name.startswith(_CONTROLLER_FACTS):
            continue
        holders.setdefault(facts[rank].get(name, "(none)"), []).append(rank)
    return holders


def _within_tolerance(holders: Mapping[str, Sequence[int]]) -> bool:
    values = [float(value.split()[0]) for value in holders if value != "(none)"]
    return not values or max(values) - min(values) <= CLOCK_TOLERANCE_S


def _table(differing: Sequence[tuple[str, Mapping[str, Sequence[int]]]]) -> str:
    rows = [("what", "value", "ranks")]
    for name, holders in differing[:MAX_ROWS]:
        for i, (value, ranks) in enumerate(holders.items()):
            rows.append((name if i == 0 else "", value, rank_set(ranks)))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows]
    left_out = len(differing) - MAX_ROWS
    if left_out > 0:
        lines.append(f"  and {left_out} more")
    count = f"{len(differing)} thing" + ("s" if len(differing) > 1 else "")
    return "\n".join([f"the processes of this launch differ in {count}:", *lines])


def _config_facts(config: LaunchConfig) -> dict[str, str]:
    values = {
        f"{section}.{key}": json.dumps(value, default=str)
        for section in _SHARED_SECTIONS
        for key, value in getattr(config, section).model_dump().items()
        if f"{section}.{key}" not in _NODE_KEYS
    }
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()
    facts = {"config": digest, **{f"config {name}": value for name, value in values.items()}}
    return {**facts, "dispatch capacity": str(dispatch_capacity(config))}


def dispatch_capacity(config: LaunchConfig) -> int:
    """`EngineConfig.capacity` without torch: most tokens that a rank sends to the experts at once."""
    engine, tp = config.engine, config.parallel.tp
    if config.parallel.dispatch_capacity is not None:
        return config.parallel.dispatch_capacity
    rows = max(engine.max_num_seqs + engine.max_num_seqs % 2, 2)
    least = -(-(rows * (1 + num_drafts(config)) + 1) // tp)
    return least + -(-engine.prefill_chunk_size // tp)


def num_drafts(config: LaunchConfig) -> int:
    """Drafts a step: what the configuration says, else 1 for a model with an MTP layer."""
    if config.draft.method == "off":
        return 0
    if config.draft.tokens is not None:
        return config.draft.tokens
    try:
        values = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
        return 1 if values.get("num_nextn_predict_layers") or values.get("num_mtp_layers") else 0
    except (OSError, ValueError, AttributeError):
        return 0  # that the model cannot be read is told by `model` and, in full, by whoever loads it


def _environment_facts(env: Mapping[str, str]) -> dict[str, str]:
    chosen = sorted(
        name for name in env if name.startswith(_ENVIRONMENT) and not name.startswith(_NOT_COMPARED)
    )
    return {f"env {name}": _short(env[name]) for name in chosen}


def _device_facts(address: str | None) -> dict[str, str]:
    nic = interface_of(address) if address is not None else device_of_route()
    return {
        "nic": nic or "unknown", "mtu": str(mtu_of(nic)) if nic else "unknown",
        "rdma devices": ", ".join(rdma_devices()) or "none", "accelerators": accelerators() or "none",
    }


def _short(value: str) -> str:
    """Long values end in a digest, so that they still differ when they do."""
    if len(value) <= 60:
        return value
    return f"{value[:40]}... ({hashlib.blake2b(value.encode(), digest_size=4).hexdigest()})"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _own_version() -> str:
    """Number and digest of the source: two checkouts of one number may still differ."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.blake2b(digest_size=6)
    for package in _OWN:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return f"{_version('lockstep')} ({digest.hexdigest()})"
