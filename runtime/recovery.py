"""How often lost ranks are replaced, and how a failed channel becomes a new one. Knows nothing of requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.channel import Channel, RankFailure

Clock = Callable[[], float]
Recover = Callable[[], Channel]


class CannotRecover(RankFailure):
    """Raised by a `recover` where trying again would not help; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """At most `max_restarts` within any `window_s` seconds; 0 is never."""

    max_restarts: int = 5
    window_s: float = 600.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts = {self.max_restarts}: expected an integer >= 0")
        if not self.window_s > 0:
            raise ValueError(f"restart_window_s = {self.window_s}: expected a number of seconds > 0")


class RestartBudget:
    """Counts restarts over a sliding window."""

    def __init__(self, limits: RestartLimits, clock: Clock = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._times: deque[float] = deque()

    @property
    def num_recent(self) -> int:
        """Restarts within the window that ends now."""
        while self._times and self._clock() - self._times[0] >= self._limits.window_s:
            self._times.popleft()
        return len(self._times)

    def take(self) -> bool:
        """Count one restart more; False, and nothing counted, when the limit is reached."""
        if self.num_recent >= self._limits.max_restarts:
            return False
        self._times.append(self._clock())
        return True


@dataclass(frozen=True, kw_only=True)
class RecoveryEvent:
    """For logs: ranks are `lost` (again, if an attempt to replace them failed), `recovered`, or `given_up` for good."""

    stage: Literal["lost", "recovered", "given_up"]
    message: str
    num_restarts: int  # within the window, this one included
    elapsed_s: float  # since the engine noticed the failure


OnEvent = Callable[[RecoveryEvent], None]


class Recovery:
    """A failed channel in, a new one out; once given up, for ever."""

    def __init__(
        self, recover: Recover | None, limits: RestartLimits, *, on_event: OnEvent | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._recover = recover
        self._limits = limits
        self._budget = RestartBudget(limits, clock)
        self._tell = on_event if on_event is not None else _nobody
        self._clock = clock
        self._final: RankFailure | None = None

    def renew(self, failure: RankFailure) -> Channel:
        """A channel to ranks that hold nothing yet. Raises RankFailure, on every call from then on, when there is none:
        `failure` itself where ranks cannot be replaced."""
        if self._recover is None:
            raise failure
        start = self._clock()
        while self._final is None:
            if not self._budget.take():
                self._give_up(f"{failure}; given up {self._why()}", start)
                break
            self._note("lost", str(failure), start)
            try:
                channel = self._recover()
            except CannotRecover as error:
                self._give_up(str(error), start)
            except RankFailure as error:
                failure = error
            except (ValueError, OSError) as error:  # the model or a setting is not what it was at the start
                self._give_up(f"{failure}; the ranks cannot be started again: {error}", start)
            else:
                self._note("recovered", "the ranks are back", start)
                return channel
        assert self._final is not None
        raise self._final

    def _why(self) -> str:
        most, window = self._limits.max_restarts, self._limits.window_s
        return f"after {self._budget.num_recent} restarts within {window:g} s (max_restarts = {most})"

    def _give_up(self, message: str, start: float) -> None:
        self._final = RankFailure(message)
        self._note("given_up", message, start)

    def _note(self, stage: Literal["lost", "recovered", "given_up"], message: str, start: float) -> None:
        self._tell(
            RecoveryEvent(
                stage=stage, message=message, num_restarts=self._budget.num_recent, elapsed_s=self._clock() - start
            )
        )


def _nobody(_event: RecoveryEvent) -> None:
    """Nobody listens."""
