"""Where a process stands in a launch: `RankEnv` from what torchrun, Slurm, Ray or a person put into the environment."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Source = Literal["torchrun", "slurm", "ray", "manual"]

# In the order of preference; the first that is set is read. The first name is the one that errors give.
VARIABLES: Mapping[Source, Mapping[str, tuple[str, ...]]] = {
    "torchrun": {
        "rank": ("RANK",), "world_size": ("WORLD_SIZE",), "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",), "node_rank": ("GROUP_RANK",), "num_nodes": ("GROUP_WORLD_SIZE",),
    },
    "slurm": {  # those of the step come first: a batch job may run steps of other sizes
        "rank": ("SLURM_PROCID",), "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": ("SLURM_LOCALID",), "node_rank": ("SLURM_NODEID",),
        "local_world_size": ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        "num_nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    },
    "ray": {
        "rank": ("RANK",), "world_size": ("WORLD_SIZE",), "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",), "node_rank": ("NODE_RANK",), "num_nodes": ("NNODES",),
    },
    "manual": {
        "rank": ("RANK",), "world_size": ("WORLD_SIZE",), "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",), "node_rank": ("NODE_RANK", "GROUP_RANK"),
        "num_nodes": ("NNODES", "GROUP_WORLD_SIZE"),
    },
}
LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER"  # set by launchers of ours: "ray", or "manual"
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, kw_only=True)
class RankEnv:
    """One process of a launch. Nodes count from 0, `local_rank` within the node; `host` is for messages."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    source: Source
    host: str = ""

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> RankEnv:
        """Raises ValueError naming the variable that is missing, is no number, or contradicts another one."""
        source = _source(env)
        names = VARIABLES[source]
        if source == "manual":
            found = _by_hand(env)
        else:
            found = {
                field: _integer(env, names[field], source)
                for field in ("rank", "world_size", "local_rank", "node_rank", "num_nodes")
            }
            found["local_world_size"] = (
                _slurm_tasks(env, found["node_rank"]) if source == "slurm"
                else _integer(env, names["local_world_size"], source)
            )
        made = cls(**found, source=source, host=socket.gethostname())
        made._check()
        return made

    def variable(self, field: str) -> str:
        """The environment variable that `field` is read from, for messages."""
        return VARIABLES[self.source][field][0]

    def _check(self) -> None:
        for index, size in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes")):
            value, limit = getattr(self, index), getattr(self, size)
            if not 0 <= value < limit:
                raise ValueError(
                    f"{self.variable(index)} = {value}: expected 0..{limit - 1}, since {self.variable(size)} = {limit}"
                )
        if self.local_world_size > self.world_size:
            raise ValueError(
                f"{self.variable('local_world_size')} = {self.local_world_size}: "
                f"more than {self.variable('world_size')} = {self.world_size}"
            )


def check_some(envs: Sequence[RankEnv], *, num_ranks: int | None = None) -> None:
    """Refuse what cannot be one launch, whoever is still to come: `num_ranks` is what the configuration asks for.

    Raises ValueError naming the variable, both values and the processes that hold them.
    """
    for env in envs:
        if num_ranks is not None and env.world_size != num_ranks:
            raise ValueError(
                f"{env.variable('world_size')} = {env.world_size} on {_who(env)}, but the configuration has dp * tp = "
                f"{num_ranks} ranks: start {num_ranks} processes, or change parallel.dp or parallel.tp"
            )
    seen: dict[int, RankEnv] = {}
    for env in envs:
        if env.rank in seen:
            raise ValueError(
                f"{env.variable('rank')} = {env.rank} twice: {_who(seen[env.rank])} and {_who(env)}; each process of "
                f"a launch needs a rank of its own"
            )
        seen[env.rank] = env
    for env in envs[1:]:
        for field in ("world_size", "num_nodes"):
            ours, theirs = getattr(envs[0], field), getattr(env, field)
            if ours != theirs:
                raise ValueError(
                    f"{env.variable(field)} differs: {ours} on {_who(envs[0])}, {theirs} on {_who(env)}"
                )
    _check_nodes(envs)


def check_world(envs: Sequence[RankEnv], *, num_ranks: int | None = None) -> None:
    """Refuse all but a whole launch: ranks are a permutation of 0..world_size - 1, each node has its local ranks once.

    Raises ValueError in one line, as `check_some` does.
    """
    if not envs:
        raise ValueError("no rank has come")
    check_some(envs, num_ranks=num_ranks)
    expected = envs[0].world_size
    missing = sorted(set(range(expected)) - {env.rank for env in envs})
    if missing:
        raise ValueError(
            f"{envs[0].variable('world_size')} = {expected}, but {rank_set(missing)} did not come: "
            f"{len(envs)} of {expected} are here"
        )


def rank_set(ranks: Sequence[int]) -> str:
    """`[r0-2,r5]`: ranks in order, runs drawn together. -1 is the controller."""
    parts: list[str] = []
    todo = sorted(set(ranks))
    if todo and todo[0] < 0:
        parts.append("controller")
        todo = [rank for rank in todo if rank >= 0]
    while todo:
        first = last = todo.pop(0)
        while todo and todo[0] == last + 1:
            last = todo.pop(0)
        parts.append(f"r{first}" if first == last else f"r{first}-{last}")
    return f"[{','.join(parts)}]"


def _check_nodes(envs: Sequence[RankEnv]) -> None:
    places: dict[tuple[int, int], RankEnv] = {}
    sizes: dict[int, RankEnv] = {}
    for env in envs:
        other = places.setdefault((env.node_rank, env.local_rank), env)
        if other is not env:
            raise ValueError(
                f"{env.variable('local_rank')} = {env.local_rank} twice on node {env.node_rank}: "
                f"{_who(other)} and {_who(env)}"
            )
        same = sizes.setdefault(env.node_rank, env)
        if same.local_world_size != env.local_world_size:
            raise ValueError(
                f"{env.variable('local_world_size')} differs on node {env.node_rank}: {same.local_world_size} for "
                f"{_who(same)}, {env.local_world_size} for {_who(env)}"
            )


def _source(env: Mapping[str, str]) -> Source:
    named = env.get(LAUNCHER_VARIABLE)
    if named is not None:
        if named not in ("ray", "manual"):
            raise ValueError(f"{LAUNCHER_VARIABLE} = {named!r}: expected ray or manual")
        return "ray" if named == "ray" else "manual"
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun"
    if "RANK" in env:
        return "manual"
    if "SLURM_PROCID" in env:
        return "slurm"
    raise ValueError(
        "RANK is not set, nor is SLURM_PROCID: start workers with torchrun, srun or `lockstep ray`, or set RANK, "
        "WORLD_SIZE and, with several on a node, LOCAL_WORLD_SIZE"
    )


def _by_hand(env: Mapping[str, str]) -> dict[str, int]:
    """RANK and WORLD_SIZE are needed; the rest follows from LOCAL_WORLD_SIZE where ranks are numbered node by node."""
    names = VARIABLES["manual"]
    rank = _integer(env, names["rank"], "manual")
    world = _integer(env, names["world_size"], "manual")
    local_world = _integer(env, names["local_world_size"], "manual", default=world)
    if local_world < 1:
        raise ValueError(f"LOCAL_WORLD_SIZE = {local_world}: expected an integer >= 1")
    return {
        "rank": rank, "world_size": world, "local_world_size": local_world,
        "local_rank": _integer(env, names["local_rank"], "manual", default=rank % local_world),
        "node_rank": _integer(env, names["node_rank"], "manual", default=rank // local_world),
        "num_nodes": _integer(env, names["num_nodes"], "manual", default=-(-world // local_world)),
    }


def _integer(env: Mapping[str, str], names: Sequence[str], source: Source, default: int | None = None) -> int:
    name = next((name for name in names if name in env), None)
    if name is None:
        if default is not None:
            return default
        raise ValueError(f"{names[0]} is not set, though this process was started by {source}")
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name} = {env[name]!r}: expected an integer") from None


def _slurm_tasks(env: Mapping[str, str], node_rank: int) -> int:
    """Tasks on this node from Slurm's list, `4(x2),1`: two nodes of 4, then one of 1."""
    names = VARIABLES["slurm"]["local_world_size"]
    name = next((name for name in names if name in env), None)
    if name is None:
        raise ValueError(f"{names[0]} is not set, though this process was started by slurm")
    counts: list[int] = []
    for part in env[name].split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{name} = {env[name]!r}: expected a list like 4(x2),1")
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node_rank < len(counts):
        raise ValueError(f"{name} = {env[name]!r} tells of {len(counts)} nodes, but SLURM_NODEID = {node_rank}")
    return counts[node_rank]


def _who(env: RankEnv) -> str:
    host = f" ({env.host})" if env.host else ""
    return f"rank {env.rank}, local rank {env.local_rank} of node {env.node_rank}{host}"
