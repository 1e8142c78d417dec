"""The life of a rank after it has loaded: allocate, then run plan after plan until told to stop."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

from runtime.rank_messages import (
    CONTROL,
    Cause,
    Failure,
    LedgerPage,
    Ready,
    Start,
    decode_control,
    encode_control,
    frame_result,
    kind_of,
    plans_of,
)
from runtime.ring import ReaderLagging, RingClosed, RingError, RingTimeout, WriterDead
from runtime.vitals import CLOSED, FAILED, READY, RankVitals

IDLE_S = 1.0  # how long one wait for a message lasts; the next begins at once
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


class Receiver(Protocol):
    """The reading side of the plan ring."""

    def receive(self, timeout_s: float) -> bytes: ...


class Sender(Protocol):
    """The writing side of the result ring."""

    def send(self, data: bytes, timeout_s: float) -> None: ...


class RankLoop:
    """One rank between its two rings. Only leaders, tp rank 0 of each dp group, send results."""

    def __init__(
        self, plans: Receiver, results: Sender, vitals: RankVitals, *, is_leader: bool, debug: bool
    ) -> None:
        self._plans = plans
        self._results = results
        self._vitals = vitals
        self._publish = self._send_result if is_leader else _drop
        self._debug = debug
        self._step_id = -1
        self._ready = False

    def serve(self, build: Callable[[], Served]) -> bool:
        """Load, run until told to stop, and say whether that went well. Never raises: a failure is sent and noted."""
        try:
            rank = build()
            self._announce(rank)
            self._follow(rank)
            self._vitals.phase("closing")
            rank.close()
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is told and this process ends)
            self._tell(error)
            return False
        self._vitals.state(CLOSED)
        return True

    def _announce(self, rank: Served) -> None:
        self._vitals.phase("waiting for the start")
        self._send(encode_control(Ready(facts=dict(rank.facts))))
        self._vitals.state(READY)
        self._ready = True

    def _follow(self, rank: Served) -> None:
        """Messages in order, until a stop or the end of the ring."""
        while True:
            try:
                data = self._plans.receive(IDLE_S)
            except RingTimeout:
                continue
            except (RingClosed, WriterDead):  # the controller has ended, one way or the other
                return
            if kind_of(data) == CONTROL:
                message = decode_control(data)
                if not isinstance(message, Start):
                    return
                self._vitals.phase("allocating")
                rank.allocate(max_model_len=message.max_model_len, num_pages=message.num_pages)
            else:
                self._step_id, plans = plans_of(data)
                self._vitals.step(self._step_id)
                self._vitals.phase("reading the plan")
                rank.run(plans, self._publish)
                digests = rank.take_digests()
                if digests is not None:
                    self._send(encode_control(LedgerPage(step_id=self._step_id, digests=dict(digests))))
            self._vitals.phase("waiting for a plan")

    def _send_result(self, result: bytes) -> None:
        self._send(frame_result(result))

    def _send(self, data: bytes) -> None:
        """The controller may be busy for longer than any wait; it is gone only when the ring says so."""
        while True:
            try:
                self._results.send(data, IDLE_S)
            except (RingTimeout, ReaderLagging):
                continue
            return

    def _tell(self, error: BaseException) -> None:
        cause = self._cause(error)
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
