"""What makes the keepers that report to a controller one launch: their places, and what they must have alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from launch import preflight
from launch.rank_env import VARIABLES, RankEnv, Source, check_some
from runtime.cluster.keeper_messages import Hello


class LaunchRules:
    """For a deployment of `num_ranks` ranks whose controller has `facts` of its own (launch/preflight.py)."""

    def __init__(self, num_ranks: int, facts: Mapping[str, str], may_differ: Sequence[str] = ()) -> None:
        self._num_ranks, self._facts, self._may_differ = num_ranks, facts, may_differ

    def arrived(self, hello: Hello) -> Hello:
        return replace(hello, facts=preflight.arrived(hello.facts))

    def check_some(self, hellos: Sequence[Hello]) -> None:
        check_some([_env(hello) for hello in hellos], num_ranks=self._num_ranks)

    def compare(self, hellos: Sequence[Hello]) -> None:
        facts = {hello.rank: hello.facts for hello in hellos}
        facts[preflight.CONTROLLER] = preflight.arrived(preflight.stamp(self._facts))
        table = preflight.compare(facts, may_differ=self._may_differ)
        if table is not None:
            raise ValueError(table)


def _env(hello: Hello) -> RankEnv:
    source: Source = hello.source if hello.source in VARIABLES else "manual"  # type: ignore[assignment]
    return RankEnv(
        rank=hello.rank, world_size=hello.world_size, local_rank=hello.local_rank,
        local_world_size=hello.local_world_size, node_rank=hello.node_rank, num_nodes=hello.num_nodes, source=source,
        host=f"{hello.host}, process {hello.pid}",
    )
