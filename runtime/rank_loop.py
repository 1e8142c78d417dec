"""The life of a rank after it has loaded: allocate, then run plan after plan until told to stop."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol, runtime_checkable

from runtime.placement_messages import PlacementReply, PlacementRequest
from runtime.rank_messages import (
    CONTROL,
    Cause,
    Failure,
    LedgerPage,
    Ready,
    Start,
    Trace,
    decode_control,
    encode_control,
    frame_result,
    kind_of,
    plans_of,
)
from runtime.ring import ReaderLagging, RingClosed, RingError, RingTimeout, WriterDead
from runtime.trace import PAGE_SPANS, clock_name, next_page
from runtime.vitals import CLOSED, FAILED, READY, RankVitals

IDLE_S = 1.0  # how long one wait for a message lasts; the next begins at once
CALLED_OFF_S = 0.05  # the same where the epoch may be called off meanwhile
STAGING_S = 0.05  # ... and where experts are being read beside the steps
FAREWELL_S = 0.5  # how long a failing rank tries to tell why

USER_ERRORS = (ValueError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class Served(Protocol):
    """A rank as the loop sees it: bytes in, bytes out."""

    @property
    def facts(self) -> Mapping[str, int]: ...

    def allocate(self, *, max_model_len: int, num_pages: int) -> None: ...

    def run(self, plans: memoryview, publish: Callable[[bytes], None]) -> None:
        """One step. `publish` takes the encoded result once, as soon as there is one."""
        ...

    def take_digests(self) -> Mapping[str, int] | None:
        """What the collectives of the last step come to, for each group; None when they are not written down."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class PlacesExperts(Protocol):
    """A served rank whose experts can be exchanged between steps."""

    @property
    def is_staging(self) -> bool:
        """Whether `placement_replies` will have something before long."""
        ...

    def place_experts(self, message: PlacementRequest) -> Sequence[PlacementReply]: ...

    def placement_replies(self) -> Sequence[PlacementReply]:
        """What has become ready since."""
        ...


class _FixedExperts:
    is_staging = False

    def place_experts(self, message: PlacementRequest) -> Sequence[PlacementReply]:
        raise ValueError(f"experts have fixed places here: {type(message).__name__} cannot be done")

    def placement_replies(self) -> Sequence[PlacementReply]:
        return ()


class Receiver(Protocol):
    """The reading side of the plan ring."""

    def receive(self, timeout_s: float) -> bytes: ...


class Sender(Protocol):
    """The writing side of the result ring."""

    def send(self, data: bytes, timeout_s: float) -> None: ...


class CalledOff(Protocol):
    """Whether the ranks no longer work together (parallel/abort.py)."""

    @property
    def is_set(self) -> bool: ...


class _NeverCalledOff:
    is_set = False


class Ending(Enum):
    """How a rank's work between two rings ended. After `LEFT` its weights are sound: it can join another epoch."""

    STOPPED = "told to stop"
    LEFT = "called off, or out of touch with the others"
    FAILED = "raised"


class RankLoop:
    """One rank between its two rings. Only leaders, tp rank 0 of each dp group, send results.

    `called_off` is looked at 20 times a second; without it the loop lasts as long as the rings.
    """

    def __init__(
        self, plans: Receiver, results: Sender, vitals: RankVitals, *, is_leader: bool, debug: bool,
        called_off: CalledOff | None = None,
    ) -> None:
        self._plans = plans
        self._results = results
        self._vitals = vitals
        self._publish = self._send_result if is_leader else _drop
        self._debug = debug
        self._can_rejoin = called_off is not None
        self._called_off: CalledOff = called_off if called_off is not None else _NeverCalledOff()
        self._idle_s = CALLED_OFF_S if self._can_rejoin else IDLE_S
        self._step_id = -1
        self._ready = False

    def serve(self, build: Callable[[], Served]) -> bool:
        """Load, run until told to stop, and say whether that went well. Never raises: a failure is sent and noted."""
        return self.live(build) is not Ending.FAILED

    def live(self, build: Callable[[], Served]) -> Ending:
        """The same, and how it ended. Without `called_off` that the rings are gone counts as being told to stop."""
        try:
            rank = build()
            self._announce(rank)
            ending = self._follow(rank)
            if ending is Ending.STOPPED:
                self._vitals.phase("closing")
                rank.close()
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is told and this process ends)
            return self._ended_by(error)
        self._vitals.state(CLOSED)
        return ending

    def _ended_by(self, error: BaseException) -> Ending:
        can_rejoin = self._can_rejoin and isinstance(error, Exception)
        if can_rejoin and self._called_off.is_set:
            return Ending.LEFT  # nobody has to be told, whatever the call brought about
        cause = self._cause(error)
        out_of_touch = can_rejoin and (cause == "communication" or isinstance(error, RingError))
        self._tell(error, "communication" if out_of_touch else cause)
        return Ending.LEFT if out_of_touch else Ending.FAILED

    def _announce(self, rank: Served) -> None:
        self._vitals.phase("waiting for the start")
        self._send(encode_control(Ready(facts=dict(rank.facts))))
        self._vitals.state(READY)
        self._ready = True

    def _follow(self, rank: Served) -> Ending:
        """Messages in order, until a stop, the end of the ring, or until the epoch is called off."""
        experts: PlacesExperts = rank if isinstance(rank, PlacesExperts) else _FixedExperts()
        while True:
            try:
                if self._called_off.is_set:
                    return Ending.LEFT
                data = self._plans.receive(min(self._idle_s, STAGING_S) if experts.is_staging else self._idle_s)
            except RingTimeout:
                self._reply(experts.placement_replies())
                continue
            except (RingClosed, WriterDead):  # whoever writes it has ended, one way or the other
                return Ending.LEFT if self._can_rejoin else Ending.STOPPED
            if kind_of(data) == CONTROL:
                message = decode_control(data)
                if isinstance(message, Trace):
                    self._trace(message.on)
                elif isinstance(message, Start):
                    self._vitals.phase("allocating")
                    rank.allocate(max_model_len=message.max_model_len, num_pages=message.num_pages)
                elif isinstance(message, PlacementRequest):
                    self._vitals.phase("placing experts")
                    self._reply(experts.place_experts(message))
                else:
                    return Ending.STOPPED
            else:
                self._step_id, plans = plans_of(data)
                self._vitals.step(self._step_id)
                self._vitals.phase("reading the plan")
                rank.run(plans, self._publish)
                digests = rank.take_digests()
                if digests is not None:
                    self._send(encode_control(LedgerPage(step_id=self._step_id, digests=dict(digests))))
                self._send_trace(least=PAGE_SPANS)
            if experts.is_staging:
                self._reply(experts.placement_replies())
            self._vitals.phase("waiting for a plan")

    def _reply(self, replies: Sequence[PlacementReply]) -> None:
        for reply in replies:
            self._send(encode_control(reply))

    def _trace(self, on: bool) -> None:
        if on:
            self._vitals.trace.start()
            return
        self._vitals.trace.stop()
        self._send_trace(least=PAGE_SPANS)
        self._send(encode_control(next_page(self._vitals.trace, clock_name(), is_last=True)))

    def _send_trace(self, least: int) -> None:
        """Send spans while there are at least so many."""
        while self._vitals.trace.num_spans >= least:
            self._send(encode_control(next_page(self._vitals.trace, clock_name())))

    def _send_result(self, result: bytes) -> None:
        self._send(frame_result(result))

    def _send(self, data: bytes) -> None:
        """The controller may be busy for longer than any wait; it is gone only when the ring says so."""
        while not self._called_off.is_set:
            try:
                self._results.send(data, self._idle_s)
            except (RingTimeout, ReaderLagging):
                continue
            return

    def _tell(self, error: BaseException, cause: Cause) -> None:
        failure = Failure(
            error=_one_line(error, named=cause != "user"), phase=self._vitals.described, step_id=self._step_id,
            time_ns=time.monotonic_ns(), cause=cause,
        )
        self._vitals.state(FAILED)
        if self._debug:
            traceback.print_exception(error)
        try:
            self._results.send(encode_control(failure), FAREWELL_S)
        except RingError:
            return  # nobody is left to tell, or the ring is full: state and exit code say the rest

    def _cause(self, error: BaseException) -> Cause:
        if not self._ready and isinstance(error, USER_ERRORS):
            return "user"
        # torch raises gloo's errors as plain RuntimeErrors, or as subclasses called Dist...Error.
        if isinstance(error, RuntimeError) and (self._vitals.in_collective or type(error).__name__.startswith("Dist")):
            return "communication"
        return "other"


def _drop(result: bytes) -> None:
    """The leader's result says the same."""


def _one_line(error: BaseException, *, named: bool) -> str:
    text = " ".join(str(error).split())
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text}" if named else text
