"""Checks of who is where: ranks, nodes, accelerators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from launch.doctor_model import GIB, Memory
from launch.doctor_report import Finding, blocking, ok, skipped, warning
from launch.network import accelerators
from launch.rank_env import LAUNCHER_VARIABLE, RankEnv, check_some, rank_set

if TYPE_CHECKING:
    from launch.config import LaunchConfig

_MAX_NODES_SHOWN = 4


def has_rank(env: Mapping[str, str]) -> bool:
    """Whether a launcher has given this process a rank."""
    return any(name in env for name in ("RANK", "SLURM_PROCID", LAUNCHER_VARIABLE, "TORCHELASTIC_RUN_ID"))


def check_ranks(env: Mapping[str, str], num_ranks: int) -> Finding:
    """This process's own place; that all together are one launch is checked where they meet."""
    if not has_rank(env):
        return skipped("launch.ranks", "not started by torchrun, srun or Ray")
    try:
        rank = RankEnv.from_environment(env)
        check_some([rank], num_ranks=num_ranks)
    except ValueError as error:
        return blocking("launch.ranks", str(error), "correct how ranks are started")
    return ok("launch.ranks", f"rank {rank.rank} of {rank.world_size}, node {rank.node_rank}, from {rank.source}")


def check_rank_map(config: LaunchConfig, local_ranks: int) -> Finding:
    """Which ranks and groups a node gets when ranks are numbered node by node, as all launchers do."""
    dp, tp = config.parallel.dp, config.parallel.tp
    num_nodes = -(-dp * tp // local_ranks)
    lines = []
    for node in range(min(num_nodes, _MAX_NODES_SHOWN)):
        ranks = range(node * local_ranks, min((node + 1) * local_ranks, dp * tp))
        groups = sorted({rank // tp for rank in ranks})
        lines.append(f"node {node}: {rank_set(ranks)}, dp {groups[0]}{f'-{groups[-1]}' if len(groups) > 1 else ''}")
    if num_nodes > _MAX_NODES_SHOWN:
        lines.append(f"and {num_nodes - _MAX_NODES_SHOWN} more nodes")
    found = "; ".join(lines)
    if num_nodes > 1 and local_ranks % tp:
        return warning(
            "launch.map", found, f"a tp group is spread over nodes: make ranks per node a multiple of tp = {tp}"
        )
    return ok("launch.map", found)


def check_accelerators(device: str, local_ranks: int) -> Finding:
    """One accelerator for each rank of this node, and libraries that can use them."""
    if device.startswith("cpu"):
        return skipped("accel.devices", f"device = cpu; here: {accelerators() or 'none'}")
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    libraries = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    found = f"{count} here ({accelerators() or 'none listed by a driver'}), {local_ranks} ranks; {libraries}"
    if count < local_ranks:
        return blocking("accel.devices", found, "fewer ranks on this node, or a torch that sees its accelerators")
    if torch.version.cuda is not None and torch.cuda.is_available():
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        found += f", NCCL {nccl}"
    return ok("accel.devices", found)


def device_memory() -> Memory | None:
    """The least free memory of this node's accelerators; None without any."""
    import torch

    if not torch.cuda.is_available():
        return None
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    least = min(free)
    return Memory(per_rank=least, source=f"least free of {len(free)} devices, {least / GIB:.0f} GiB")
