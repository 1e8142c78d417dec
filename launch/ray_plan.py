"""Who sits where under Ray: seats of ranks from the nodes that Ray chose, and what each worker is told of its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.rank_env import LAUNCHER_VARIABLE, RankEnv

FORWARDED = ("NCCL_", "NVSHMEM_", "GLOO_", "UCX_", "TORCH_", "HF_", "TRANSFORMERS_", "OTEL_", "LOCKSTEP_", "OMP_")
_NOT_FORWARDED = ("LOCKSTEP_LAUNCHER", "LOCKSTEP_CONTROLLER", "LOCKSTEP_ADVERTISE")


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One rank's place: bundle `bundle` of the placement group `group`, on the node with Ray's id `node`."""

    env: RankEnv
    group: int
    bundle: int
    node: str


def seat_ranks(nodes_of_bundles: Sequence[Sequence[str]]) -> list[Seat]:
    """Seats in order of rank. `nodes_of_bundles`: for each placement group, one a dp group, the node of each bundle.

    Groups are renumbered so that ranks go node by node; nodes are numbered by their first group. Raises ValueError when
    a group was spread over nodes, or groups have different sizes.
    """
    sizes = {len(nodes) for nodes in nodes_of_bundles}
    if len(sizes) != 1:
        raise ValueError(f"placement groups of {sorted(sizes)} bundles: expected one size, tp")
    for group, nodes in enumerate(nodes_of_bundles):
        if len(set(nodes)) != 1:
            raise ValueError(f"placement group {group} lies on {len(set(nodes))} nodes: a tp group must be on one")
    homes = [nodes[0] for nodes in nodes_of_bundles]
    order = list(dict.fromkeys(homes))
    tp, world = sizes.pop(), sum(len(nodes) for nodes in nodes_of_bundles)
    seats: list[Seat] = []
    for node_rank, node in enumerate(order):
        groups = [group for group, home in enumerate(homes) if home == node]
        for local_rank, (group, bundle) in enumerate((group, bundle) for group in groups for bundle in range(tp)):
            env = RankEnv(
                rank=len(seats), world_size=world, local_rank=local_rank, local_world_size=len(groups) * tp,
                node_rank=node_rank, num_nodes=len(order), source="ray",
            )
            seats.append(Seat(env=env, group=group, bundle=bundle, node=node))
    return seats


def variables(env: RankEnv) -> dict[str, str]:
    """What `RankEnv.from_environment` reads in the worker."""
    return {
        LAUNCHER_VARIABLE: "ray", "RANK": str(env.rank), "WORLD_SIZE": str(env.world_size),
        "LOCAL_RANK": str(env.local_rank), "LOCAL_WORLD_SIZE": str(env.local_world_size),
        "NODE_RANK": str(env.node_rank), "NNODES": str(env.num_nodes),
    }


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """The driver's variables that matter on every node: those set only in one shell are a well-known trap."""
    return {
        name: value for name, value in env.items()
        if name.startswith(FORWARDED) and not name.startswith(_NOT_FORWARDED)
    }


def visible_devices(seats: Sequence[Seat], devices: Sequence[Sequence[str]]) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each rank: all devices of its node's ranks, in order of local rank.

    `devices`: those that Ray gave each rank, in order of rank; a rank takes the one at its local rank, and its
    neighbours' must be visible for direct copies. None where Ray gave none. Raises ValueError where it is not one each.
    """
    if not any(devices):
        return [None] * len(seats)
    for seat, own in zip(seats, devices, strict=True):
        if len(own) != 1:
            raise ValueError(f"Ray gave rank {seat.env.rank} the devices {list(own)}: expected one")
    return [
        ",".join(own[0] for other, own in zip(seats, devices, strict=True) if other.node == seat.node)
        for seat in seats
    ]
