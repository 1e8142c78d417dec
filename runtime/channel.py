"""The way of a step's plans to its ranks and of their results back; here: to a rank in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import torch

from parallel.trace import Recorder
from runtime.executor import Executor
from runtime.plan import StepPlan, StepResult, decode, encode
from runtime.trace import PAGE_SPANS, ProcessTrace, clock_name, next_page


class RankFailure(RuntimeError):
    """A rank died, stopped or raised; the message is one line naming the rank and what it was doing."""


class Channel(Protocol):
    """Steps go out and come back in order, one plan and one result for each dp group."""

    def send(self, plans: Sequence[StepPlan]) -> None:
        """Start a step. Raises what an earlier step raised after its counts were out."""
        ...

    def receive(self) -> list[StepResult]:
        """Results of the oldest step in flight; waits for them. Raises RankFailure, or what the step raised."""
        ...

    def raise_failure(self) -> None:
        """Raise what a step has raised, on every call from then on: no later plan can be trusted to run."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Traceable(Protocol):
    """A channel whose ranks can note what they do."""

    def start_trace(self) -> None:
        """Note what the steps sent from now on do."""
        ...

    def stop_trace(self) -> list[ProcessTrace]:
        """Of each rank, in rank order; no step is in flight."""
        ...


class LocalChannel:
    """Runs plans in order on one thread, which stands in for the device's stream: the host plans on meanwhile.

    With `inline` a plan runs within `send`. With `through_codec` every plan travels as bytes (debug mode). `trace` is
    where the executor and its model note what they do.
    """

    def __init__(
        self, executor: Executor, *, threads: int, inline: bool, through_codec: bool, trace: Recorder | None = None
    ) -> None:
        self._executor = executor
        self._trace = trace if trace is not None else Recorder()
        self._through_codec = through_codec
        self._failure: BaseException | None = None
        self._in_flight: deque[Future[StepResult]] = deque()
        self._pool = None
        if inline:
            torch.set_num_threads(threads)
        else:
            self._pool = ThreadPoolExecutor(1, "lockstep-rank", initializer=torch.set_num_threads, initargs=(threads,))

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def send(self, plans: Sequence[StepPlan]) -> None:
        self.raise_failure()
        (plan,) = plans
        if self._through_codec:
            plan = decode(encode(plan))
        counts: Future[StepResult] = Future()
        self._in_flight.append(counts)
        if self._pool is None:
            self._run(plan, counts)
        else:
            self._pool.submit(self._run, plan, counts)

    def receive(self) -> list[StepResult]:
        return [self._in_flight.popleft().result()]

    def start_trace(self) -> None:
        self._trace.start()

    def stop_trace(self) -> list[ProcessTrace]:
        self._trace.stop()
        trace = ProcessTrace()
        while not trace.is_complete:
            page = next_page(self._trace, clock_name(), is_last=self._trace.num_spans <= PAGE_SPANS)
            trace.add(page, page.sent_ns)
        return [trace]

    def close(self) -> None:
        """Wait for the steps in flight; none can be sent after them."""
        if self._pool is not None:
            self._pool.shutdown()
        self._failure = self._failure or RuntimeError("the engine is closed")

    def _run(self, plan: StepPlan, counts: Future[StepResult]) -> None:
        self._trace.step = plan.step_id
        try:
            self._executor.run(plan, counts.set_result)
        except BaseException as error:
            self._failure = error
            if not counts.done():
                counts.set_exception(error)
            raise
        self._trace.phase("waiting for a plan")
