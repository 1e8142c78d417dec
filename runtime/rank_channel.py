"""The way of plans to ranks in processes of their own and of results back, with an eye on whether they still live."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NoReturn, Protocol

from parallel.layout import Layout
from runtime.channel import RankFailure
from runtime.ledger_check import LedgerCheck
from runtime.load_progress import StartupWatcher
from runtime.placement_messages import PlacementReply, PlacementRequest
from runtime.plan import StepPlan, StepResult, encode_step
from runtime.rank_messages import (
    RESULT,
    Failure,
    LedgerPage,
    Ready,
    Start,
    Stop,
    Trace,
    TracePage,
    decode_control,
    encode_control,
    frame_plans,
    kind_of,
    result_of,
)
from runtime.rank_watch import Diagnosis, RankWatch, VitalsReader, rank_names
from runtime.result_codec import decode_result
from runtime.ring import MessageTooLarge, RingDamaged, RingError
from runtime.sizing import Sizes
from runtime.trace import ProcessTrace

LOOK_S = 0.05  # between two looks at the ranks
CLOSE_S = 3.0  # how long ranks may take to end by themselves
TRACE_S = 5.0  # ... and to send the last pages of a trace


class PlanSender(Protocol):
    """What is needed of RingWriter; a ring of another host has it, too."""

    def send(self, data: bytes, timeout_s: float) -> None: ...

    def close(self) -> None: ...


class ResultReceiver(Protocol):
    """What is needed of Inbox."""

    def try_receive(self) -> bytes | None: ...

    def receive(self, timeout_s: float) -> bytes | None: ...

    def close(self) -> None: ...


class RankChannel:
    """A Channel (runtime/channel.py) over one ring to all ranks and one from each. Owns rings, page and processes.

    Whoever holds it drives it: ranks are looked at while it waits, and at most every 50 ms in `raise_failure`.
    """

    def __init__(
        self, layout: Layout, plans: PlanSender, results: Sequence[ResultReceiver], vitals: VitalsReader,
        watch: RankWatch, *, step_timeout_s: float, store: object = None,
    ) -> None:
        self._layout = layout
        self._plans = plans
        self._results = results
        self._vitals = vitals
        self._watch = watch
        self._step_timeout_s = step_timeout_s
        self._store = store  # what the ranks meet over must last as long as they do
        self._waiting: list[deque[StepResult]] = [deque() for _ in results]
        self._facts: dict[int, dict[str, int]] = {}
        self._in_flight: deque[int] = deque()  # steps, oldest first
        self._moved = time.monotonic()  # when the oldest step in flight became the oldest
        self._looked = 0.0
        self._failure: RuntimeError | None = None
        self._ledgers = LedgerCheck(layout)
        self._replies: list[tuple[int, PlacementReply]] = []
        self._traces: dict[int, ProcessTrace] = {}

    @property
    def facts(self) -> list[dict[str, int]]:
        """What each rank reported of itself after loading, in rank order."""
        return [self._facts[rank] for rank in range(self._layout.ep)]

    @property
    def num_compared_steps(self) -> int:
        """Debug mode: steps whose collectives were the same on all ranks."""
        return self._ledgers.num_compared

    def wait_ready(self, watcher: StartupWatcher | None = None) -> list[dict[str, int]]:
        """Wait until every rank has loaded. Raises ValueError for the user's mistakes, RankFailure for the rest."""
        while len(self._facts) < self._layout.ep:
            self._look()
            if watcher is not None:
                watcher.update(self._vitals.read())
            time.sleep(LOOK_S / 2)
        return self.facts

    def start(self, sizes: Sizes) -> None:
        """Have every rank allocate; plans may follow."""
        self._send(encode_control(Start(max_model_len=sizes.max_model_len, num_pages=sizes.num_pages)))

    def send(self, plans: Sequence[StepPlan]) -> None:
        assert len(plans) == self._layout.dp, (len(plans), self._layout)
        self.raise_failure()
        step_id = plans[0].step_id
        self._send(frame_plans(step_id, encode_step(plans)))
        if not self._in_flight:
            self._moved = time.monotonic()
        self._in_flight.append(step_id)

    def receive(self) -> list[StepResult]:
        assert self._in_flight, "no step is in flight"
        results = [self._next_result(dp_rank * self._layout.tp) for dp_rank in range(self._layout.dp)]
        step_id = self._in_flight.popleft()
        assert all(result.step_id == step_id for result in results), (step_id, [r.step_id for r in results])
        self._moved = time.monotonic()
        return results

    def start_trace(self) -> None:
        """Have every rank note what it does in the steps sent from now on."""
        self._traces = {rank: ProcessTrace() for rank in range(self._layout.ep)}
        self._send(encode_control(Trace(on=True)))

    def stop_trace(self) -> list[ProcessTrace]:
        """What every rank has noted, in rank order; what came of it if ranks have failed."""
        try:
            self.raise_failure()
            self._send(encode_control(Trace(on=False)))
            until = time.monotonic() + TRACE_S
            while time.monotonic() < until and not all(trace.is_complete for trace in self._traces.values()):
                self._look()
                time.sleep(0.005)
        except RankFailure:
            pass
        return [self._traces[rank] for rank in sorted(self._traces)]

    def request(self, message: PlacementRequest) -> None:
        """Have every rank place experts as told, between the steps that are sent before and after."""
        self.raise_failure()
        self._send(encode_control(message))

    def replies(self) -> list[tuple[int, PlacementReply]]:
        """What ranks have said about their experts since the last call, each with its rank."""
        self.raise_failure()
        replies, self._replies = self._replies, []
        return replies

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if time.monotonic() - self._looked >= LOOK_S:
            self._look()

    def close(self) -> None:
        """Let the ranks end what they are at and stop; kill those that do not within seconds. Never raises."""
        try:
            if self._failure is None:
                self._failure = RuntimeError("the engine is closed")
                self._plans.send(encode_control(Stop()), CLOSE_S)
                self._watch.wait_all(CLOSE_S)
        except RingError:
            pass  # a rank is gone already
        finally:
            self._end()

    def kill(self) -> None:
        """End everything now. May follow a failure."""
        self._failure = self._failure or RuntimeError("the engine is closed")
        self._end()

    def _next_result(self, rank: int) -> StepResult:
        waiting = self._waiting[rank]
        while not waiting:
            if self._failure is not None:
                raise self._failure
            if not self._take_next(rank, LOOK_S):
                self._look()
        return waiting.popleft()

    def _send(self, data: bytes) -> None:
        until = time.monotonic() + self._step_timeout_s
        while True:
            try:
                self._plans.send(data, LOOK_S)
            except MessageTooLarge as error:  # the planner counts on this step: nothing can follow without it
                self._fail(Diagnosis(message=str(error)))
            except RingError as error:  # full, or a rank is gone: the look says who is to blame
                self._look()
                if time.monotonic() > until:
                    self._fail(Diagnosis(message=f"no plan can be sent: {error}"))
                time.sleep(LOOK_S)
                continue
            return

    def _take_next(self, rank: int, timeout_s: float) -> bool:
        """Take in a rank's next message; False if there is none within `timeout_s`."""
        inbox = self._results[rank]
        try:
            data = inbox.receive(timeout_s) if timeout_s else inbox.try_receive()
            if data is not None:
                self._take(rank, data)
        except (RingDamaged, ValueError) as error:
            name = rank_names(self._layout)[rank]
            self._fail(Diagnosis(message=f"{name} sent what cannot be read: {error}"))
        return data is not None

    def _take(self, rank: int, data: bytes) -> None:
        if kind_of(data) == RESULT:
            self._waiting[rank].append(decode_result(result_of(data)))
            return
        message = decode_control(data)
        if isinstance(message, Failure):
            self._watch.report(rank, message)
        elif isinstance(message, Ready):
            self._facts[rank] = dict(message.facts)
        elif isinstance(message, LedgerPage):
            difference = self._ledgers.add(rank, message.step_id, message.digests)
            if difference is not None:
                self._fail(Diagnosis(message=difference))
        elif isinstance(message, PlacementReply):
            self._replies.append((rank, message))
        elif isinstance(message, TracePage):
            if rank in self._traces:
                self._traces[rank].add(message, time.monotonic_ns())
        else:
            raise ValueError(f"a rank does not say {message!r}")

    def _look(self) -> None:
        """Read what has come in, judge, and end everything if a rank has failed."""
        exited = self._watch.exited()
        for rank in range(self._layout.ep):
            while self._take_next(rank, 0.0):
                pass
        self._looked = time.monotonic()
        diagnosis = self._watch.look(exited, in_step=self._waits_for_ranks) or self._late()
        if diagnosis is not None:
            self._fail(diagnosis)

    def _late(self) -> Diagnosis | None:
        """Whether the oldest step in flight takes too long. One whose results lie here waits for us."""
        late = self._looked - self._moved
        if not self._waits_for_ranks or late <= self._step_timeout_s:
            return None
        return Diagnosis(
            message=f"step {self._in_flight[0]} has not ended within {late:.0f} s: {self._watch.overview()}"
        )

    @property
    def _waits_for_ranks(self) -> bool:
        """Whether a step is in flight whose results do not all lie here."""
        return bool(self._in_flight) and not all(self._waiting[:: self._layout.tp])

    def _fail(self, diagnosis: Diagnosis) -> NoReturn:
        self._failure = RankFailure(diagnosis.message)
        self._end()
        if diagnosis.is_user_error:
            raise ValueError(diagnosis.message)
        raise self._failure

    def _end(self) -> None:
        """Processes first: nobody writes any more when the rings go. May be called twice."""
        self._watch.kill()
        self._plans.close()
        for inbox in self._results:
            inbox.close()
        self._vitals.close()
        self._store = None
