"""Channels that fail at chosen calls, over executors that are given up with them: an engine's ranks, lost at will."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from runtime.channel import Channel, RankFailure
from runtime.config import EngineConfig
from runtime.engine import Deployment, Engine
from runtime.executor import Executor
from runtime.loading import LoadedModel
from runtime.plan import StepPlan, StepResult, decode_section, encode_step
from runtime.rank import build_executor
from runtime.recovery import OnEvent, RestartLimits
from runtime.sizing import choose_sizes


class GroupsChannel:
    """One executor for each dp group, in this thread; plans travel as bytes. Groups of a toy model share no experts."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors
        self._results: deque[list[StepResult]] = deque()

    def send(self, plans: Sequence[StepPlan]) -> None:
        data = encode_step(plans)
        results: list[StepResult] = []
        for group, executor in enumerate(self._executors):
            executor.run(decode_section(data, group), results.append)
        self._results.append(results)

    def receive(self) -> list[StepResult]:
        return self._results.popleft()

    def raise_failure(self) -> None:
        """Nothing fails here."""

    def close(self) -> None:
        self._executors = ()


@dataclass
class Strikes:
    """Which calls over all channels, and which attempts to make a new one, fail; and what happened."""

    calls: frozenset[int] = frozenset()
    attempts: frozenset[int] = frozenset()
    num_calls: int = 0
    num_attempts: int = 0
    struck: list[str] = field(default_factory=list)

    def falls(self, what: str) -> bool:
        self.num_calls += 1
        if self.num_calls - 1 not in self.calls:
            return False
        self.struck.append(what)
        return True


class FailingChannel:
    """Passes everything on to `inner` until a strike falls; from then on every call raises."""

    def __init__(self, inner: Channel, strikes: Strikes) -> None:
        self._inner = inner
        self._strikes = strikes
        self._failure: RankFailure | None = None

    def raise_failure(self) -> None:
        self._strike("look")
        self._inner.raise_failure()

    def send(self, plans: Sequence[StepPlan]) -> None:
        self._strike("send")
        self._inner.send(plans)

    def receive(self) -> list[StepResult]:
        self._strike("receive")
        return self._inner.receive()

    def close(self) -> None:
        self._inner.close()

    def _strike(self, what: str) -> None:
        if self._failure is None and self._strikes.falls(what):
            self._failure = RankFailure(f"rank 1 was killed at call {self._strikes.num_calls - 1}")
        if self._failure is not None:
            raise self._failure


def failing_engine(
    config: EngineConfig, make: Callable[[], Channel], deployment: Callable[[Channel], Deployment], strikes: Strikes,
    on_event: OnEvent | None = None,
) -> Engine:
    """An engine whose channels, each around a `make()`, fail as `strikes` say and are replaced."""
    channels: list[Channel] = []

    def new() -> Channel:
        while channels:
            channels.pop().close()
        channels.append(FailingChannel(make(), strikes))
        return channels[0]

    def recover() -> Channel:
        strikes.num_attempts += 1
        if strikes.num_attempts - 1 in strikes.attempts:
            raise RankFailure(f"rank 0 died at attempt {strikes.num_attempts - 1}")
        return new()

    base = deployment(new())
    full = Deployment(
        facts=base.facts, sizes=base.sizes, channel=base.channel, bytes_read=(), recover=recover,
        restarts=RestartLimits(max_restarts=10**6),
    )
    return Engine(config, deployment=full, on_event=on_event)


def failing_toy(
    config: EngineConfig, loaded: LoadedModel, calls: Iterable[int] = (), attempts: Iterable[int] = (),
    on_event: OnEvent | None = None,
) -> tuple[Engine, Strikes]:
    """An engine over a toy model, one executor a dp group, all of them new after every strike."""
    strikes = Strikes(calls=frozenset(calls), attempts=frozenset(attempts))
    sizes = choose_sizes(config, loaded.facts)

    def make() -> Channel:
        return GroupsChannel([build_executor(config, loaded, sizes) for _ in range(config.dp)])

    def deployment(channel: Channel) -> Deployment:
        return Deployment(facts=loaded.facts, sizes=sizes, channel=channel, bytes_read=())

    return failing_engine(config, make, deployment, strikes, on_event), strikes
