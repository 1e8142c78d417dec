"""The way of a plan to its rank and of a result back, when controller and rank share a process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from runtime.executor import Executor
from runtime.plan import StepPlan, StepResult, decode, encode


class LocalChannel:
    """Runs plans in order on one thread, which stands in for the device's stream: the host plans on meanwhile.

    With `inline` a plan runs within `send`. With `through_codec` every plan travels as bytes (debug mode).
    """

    def __init__(self, executor: Executor, *, threads: int, inline: bool, through_codec: bool) -> None:
        self._executor = executor
        self._through_codec = through_codec
        self._failure: BaseException | None = None
        self._pool = None
        if inline:
            torch.set_num_threads(threads)
        else:
            self._pool = ThreadPoolExecutor(1, "lockstep-rank", initializer=torch.set_num_threads, initargs=(threads,))

    def raise_failure(self) -> None:
        """Raise what a step has raised, on every call from then on: no later plan can be trusted to run."""
        if self._failure is not None:
            raise self._failure

    def send(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step. Raises what an earlier step raised after its counts were out."""
        self.raise_failure()
        if self._through_codec:
            plan = decode(encode(plan))
        counts: Future[StepResult] = Future()
        if self._pool is None:
            self._run(plan, counts)
        else:
            self._pool.submit(self._run, plan, counts)
        return counts

    def close(self) -> None:
        """Wait for the steps in flight; none can be sent after them."""
        if self._pool is not None:
            self._pool.shutdown()
        self._failure = self._failure or RuntimeError("the engine is closed")

    def _run(self, plan: StepPlan, counts: Future[StepResult]) -> None:
        try:
            self._executor.run(plan, counts.set_result)
        except BaseException as error:
            self._failure = error
            if not counts.done():
                counts.set_exception(error)
            raise
