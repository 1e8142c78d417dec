"""The way of a plan to its rank and of a result back, when controller and rank share a process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

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

    def send(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step. Raises what an earlier step raised after its counts were out."""
        if self._failure is not None:
            raise self._failure
        if self._through_codec:
            plan = decode(encode(plan))
        counts: Future[StepResult] = Future()
        if self._pool is None:
            self._executor.run(plan, counts.set_result)
        else:
            run = self._pool.submit(self._executor.run, plan, counts.set_result)
            run.add_done_callback(partial(self._relay_failure, counts))
        return counts

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _relay_failure(self, counts: Future[StepResult], run: Future[None]) -> None:
        error = None if run.cancelled() else run.exception()
        if error is None:
            return
        self._failure = error
        if not counts.done():
            counts.set_exception(error)
