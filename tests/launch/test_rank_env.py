"""RankEnv from the variables that each launcher sets; what cannot be one launch is refused, and the variable named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from launch.rank_env import RankEnv, check_some, check_world, rank_set

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "SLURM_PROCID": "0",  # torchrun inside of a Slurm job
}
SLURM = {
    "SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_NNODES": "3",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
}
RAY = {
    "LOCKSTEP_LAUNCHER": "ray", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1", "NNODES": "2",
}


def place(env: RankEnv) -> tuple[int, ...]:
    return env.rank, env.world_size, env.local_rank, env.local_world_size, env.node_rank, env.num_nodes


@pytest.mark.parametrize(
    ("variables", "source", "expected"),
    [
        (TORCHRUN, "torchrun", (5, 8, 1, 4, 1, 2)),
        (SLURM, "slurm", (4, 5, 0, 1, 2, 3)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "slurm", (4, 6, 0, 2, 2, 3)),
        (RAY, "ray", (3, 4, 1, 2, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "manual", (3, 4, 1, 2, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "manual", (1, 2, 1, 2, 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "2"}, "manual",
         (1, 3, 0, 1, 2, 3)),
    ],
)
def test_each_launcher(variables: Mapping[str, str], source: str, expected: tuple[int, ...]) -> None:
    env = RankEnv.from_environment(variables)
    assert (env.source, place(env)) == (source, expected)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "RANK is not set, nor is SLURM_PROCID"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, though this process was started by manual"),
        ({name: TORCHRUN[name] for name in TORCHRUN if name != "LOCAL_RANK"}, "LOCAL_RANK is not set"),
        (TORCHRUN | {"RANK": "five"}, "RANK = 'five': expected an integer"),
        (TORCHRUN | {"RANK": "8"}, "RANK = 8: expected 0..7, since WORLD_SIZE = 8"),
        (TORCHRUN | {"GROUP_RANK": "2"}, "GROUP_RANK = 2: expected 0..1, since GROUP_WORLD_SIZE = 2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE = 9: more than WORLD_SIZE = 8"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "2(x"}, "SLURM_TASKS_PER_NODE = '2(x': expected a list like 4(x2),1"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "2"}, "tells of 1 nodes, but SLURM_NODEID = 2"),
        (SLURM | {"SLURM_PROCID": "-1"}, "SLURM_PROCID = -1: expected 0..4, since SLURM_STEP_NUM_TASKS = 5"),
        (RAY | {"LOCKSTEP_LAUNCHER": "sun"}, "LOCKSTEP_LAUNCHER = 'sun': expected ray or manual"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE = 0: expected an integer >= 1"),
    ],
)
def test_the_variable_at_fault_is_named(variables: Mapping[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RankEnv.from_environment(variables)


def world(num_nodes: int = 2, per_node: int = 2) -> list[RankEnv]:
    return [
        RankEnv(
            rank=rank, world_size=num_nodes * per_node, local_rank=rank % per_node, local_world_size=per_node,
            node_rank=rank // per_node, num_nodes=num_nodes, source="torchrun", host=f"host{rank // per_node}",
        )
        for rank in range(num_nodes * per_node)
    ]


def test_a_whole_launch_passes_in_any_order() -> None:
    check_world(world()[::-1], num_ranks=4)
    check_some(world()[2:], num_ranks=4)  # the others may still come


def test_the_same_rank_twice_names_variable_and_places() -> None:
    envs = world()
    envs[3] = replace(envs[3], rank=1)
    with pytest.raises(ValueError, match=r"RANK = 1 twice: rank 1, local rank 1 of node 0 \(host0\) and rank 1, local"):
        check_some(envs)


def test_a_world_that_the_configuration_does_not_ask_for() -> None:
    with pytest.raises(ValueError, match=r"WORLD_SIZE = 4 on rank 0.* dp \* tp = 2 ranks: start 2 processes"):
        check_some(world()[:1], num_ranks=2)


@pytest.mark.parametrize(("field", "name"), [("world_size", "WORLD_SIZE"), ("num_nodes", "GROUP_WORLD_SIZE")])
def test_sizes_that_differ_between_nodes(field: str, name: str) -> None:
    envs = world()
    envs[2] = replace(envs[2], world_size=6) if field == "world_size" else replace(envs[2], num_nodes=6)
    with pytest.raises(ValueError, match=rf"{name} differs: \d on rank 0.*, 6 on rank 2"):
        check_some(envs)


def test_a_place_on_a_node_is_taken_once() -> None:
    envs = world()
    envs[3] = replace(envs[3], local_rank=0)
    with pytest.raises(ValueError, match=r"LOCAL_RANK = 0 twice on node 1"):
        check_some(envs)
    envs[3] = replace(envs[3], local_rank=1, local_world_size=3)
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE differs on node 1: 2 for rank 2.*, 3 for rank 3"):
        check_some(envs)


def test_ranks_that_did_not_come_are_named() -> None:
    with pytest.raises(ValueError, match=r"WORLD_SIZE = 4, but \[r0,r2-3\] did not come: 1 of 4 are here"):
        check_world([world()[1]])
    with pytest.raises(ValueError, match="no rank has come"):
        check_world([])


def test_rank_sets_draw_runs_together() -> None:
    assert rank_set([3, 0, 1, 2, 7, 5, 6]) == "[r0-3,r5-7]"
    assert rank_set([-1, 4]) == "[controller,r4]"
