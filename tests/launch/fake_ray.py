"""As much of Ray as `lockstep ray` uses, in this process: actors are objects, calls are done at once."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


class FakeRayError(Exception):
    """What every exception of Ray is."""


class FakeTimeoutError(FakeRayError):
    """A call that did not come back."""


class Failed:
    """The result of a call that failed."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Method:
    """`actor.name.remote(...)`."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any) -> Any:
        if self._name == "where":
            return self._actor.node, "127.0.0.1", self._actor.devices
        if self._actor.is_dead:
            return Failed(FakeRayError("the actor is dead"))
        return getattr(self._actor.target, self._name)(*args)


class Actor:
    """An actor where its options put it."""

    def __init__(self, target: Any, options: Mapping[str, Any], cluster: FakeRay) -> None:
        self.target, self.options, self.is_dead = target, options, False
        strategy = options["scheduling_strategy"]
        self.node: str = strategy.node_id if hasattr(strategy, "node_id") else strategy.placement_group.node
        self.devices = [str(cluster.next_device())] if options.get("num_gpus") else []

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class Group:
    """A placement group on one node; `ready` fails when there is none left."""

    def __init__(self, bundles: Sequence[Mapping[str, float]], strategy: str, node: str | None) -> None:
        self.bundles, self.strategy, self.node = bundles, strategy, node

    def ready(self) -> Any:
        return Failed(FakeTimeoutError()) if self.node is None else None


class FakeRay(types.ModuleType):
    """`nodes`: where the placement groups go, in order; `actors`: all that were made."""

    def __init__(self, nodes: Sequence[str]) -> None:
        super().__init__("ray")
        self.nodes = list(nodes)
        self.actors: list[Actor] = []
        self.groups: list[Group] = []  # those that were not given back
        self.placed: list[Group] = []
        self.num_devices = 0
        self.exceptions = types.SimpleNamespace(RayError=FakeRayError, GetTimeoutError=FakeTimeoutError)
        self.util = types.SimpleNamespace(
            placement_group=self._place, remove_placement_group=self.groups.remove,
            placement_group_table=lambda group: {
                "bundles_to_node_id": dict.fromkeys(range(len(group.bundles)), group.node)
            },
        )
        self.strategies = types.SimpleNamespace(
            PlacementGroupSchedulingStrategy=types.SimpleNamespace, NodeAffinitySchedulingStrategy=types.SimpleNamespace
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        modules: dict[str, Any] = {
            "ray": self, "ray.exceptions": self.exceptions, "ray.util": self.util,
            "ray.util.scheduling_strategies": self.strategies,
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def next_device(self) -> int:
        self.num_devices += 1
        return self.num_devices - 1

    def is_initialized(self) -> bool:
        return True

    def shutdown(self) -> None:
        self.is_shut_down = True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0, "memory": 1e9}

    def remote(self, kind: type) -> Any:
        def options(**given: Any) -> Any:
            def make() -> Actor:
                actor = Actor(kind(), given, self)
                self.actors.append(actor)
                return actor

            return types.SimpleNamespace(remote=make)

        return types.SimpleNamespace(options=options)

    def get(self, call: Any, timeout: float) -> Any:
        assert timeout > 0
        if isinstance(call, list):
            return [self.get(each, timeout) for each in call]
        if isinstance(call, Failed):
            raise call.error
        return call

    def wait(self, calls: Sequence[Any], num_returns: int, timeout: float) -> None:
        assert num_returns == len(calls)
        assert timeout > 0

    def kill(self, actor: Actor) -> None:
        actor.target.stop()
        actor.is_dead = True

    def _place(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> Group:
        index = len(self.groups)
        group = Group(bundles, strategy, self.nodes[index] if index < len(self.nodes) else None)
        self.groups.append(group)
        self.placed.append(group)
        return group
