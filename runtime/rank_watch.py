"""Which rank failed first, and how: from exit codes, heartbeats and what the ranks themselves report.

One rank's end makes others fail: they wait for it, or lose their connection to it. So the first sign of trouble only
starts a short grace period; then the likeliest cause is named: a process that ended, before one that stands still,
before one that hangs, before one that raised, before one that lost a connection, before all that wait for each other.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from parallel.layout import Layout
from runtime.hang_watch import HangWatch
from runtime.rank_messages import Failure
from runtime.vitals import FAILED, STARTING, RankVital

ENDED, STANDS_STILL, HANGS, RAISED, LOST_CONNECTION, NOBODY_MOVES = range(6)  # in order of preference
NOBODY = -1  # the rank to blame when all wait for each other

KILL_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long each sign is waited for, in seconds.

    A rank that starts holds its interpreter for long while libraries load: then silence counts only if the operating
    system says that the process is stopped.
    """

    stall_s: float = 2.5
    start_stall_s: float = 120.0
    grace_s: float = 0.3
    connection_grace_s: float = 1.0  # as long as every sign is a lost connection
    step_s: float = 120.0
    gap_s: float = 0.25  # a longer gap between two looks counts as this much silence: the watcher was away, too


class Process(Protocol):
    """What is needed of subprocess.Popen."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class VitalsReader(Protocol):
    """What is needed of Vitals."""

    def read(self) -> list[RankVital]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, order=True)
class _Suspect:
    category: int
    time_s: float
    rank: int
    text: str
    is_user_error: bool = False


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One line naming the rank. `is_user_error`: a file or setting is at fault, not the program or the machine."""

    message: str
    is_user_error: bool = False


def rank_names(layout: Layout) -> list[str]:
    return [f"rank {r} (dp {layout.dp_rank(r)}, tp {layout.tp_rank(r)})" for r in range(layout.ep)]


class RankWatch:
    """Looks at all ranks whenever `look` is called, and decides when it is sure."""

    def __init__(
        self, names: Sequence[str], processes: Sequence[Process], vitals: VitalsReader, patience: Patience
    ) -> None:
        self._names = names
        self._processes = processes
        self._vitals = vitals
        self._patience = patience
        self._suspects: dict[int, _Suspect] = {}
        self._first_sign = 0.0
        self._looked = time.monotonic()
        self._beats = [0] * len(names)  # the last heartbeat of each rank
        self._silence_s = [0.0] * len(names)  # and for how long we have seen no other
        self._hangs = HangWatch(len(names), patience.stall_s)

    def exited(self) -> list[int]:
        """Ranks whose process has ended. Read their messages after this, then `look`: no last word is missed."""
        return [rank for rank, process in enumerate(self._processes) if process.poll() is not None]

    def report(self, rank: int, failure: Failure) -> None:
        """A rank's own word on why it ends; the first one counts."""
        lost = failure.cause == "communication"
        known = self._suspects.get(rank)
        if known is not None and known.category in (RAISED, LOST_CONNECTION):
            return
        is_user_error = failure.cause == "user"
        where = "" if is_user_error else f" failed{_where(failure.phase, failure.step_id)}"
        self._suspects[rank] = _Suspect(
            LOST_CONNECTION if lost else RAISED, failure.time_ns / 1e9, rank,
            f"{self._names[rank]}{where}: {failure.error}", is_user_error,
        )

    def look(self, exited: Sequence[int], *, in_step: bool = False) -> Diagnosis | None:
        """What is wrong, once it is certain enough; None while nothing is, or while the grace period lasts.

        `in_step`: results of a step are being waited for, so that ranks must get on.
        """
        now = time.monotonic()
        gap_s = min(now - self._looked, self._patience.gap_s)
        self._looked = now
        vitals = self._vitals.read()
        for rank in exited:
            if rank not in self._suspects:
                self._suspects[rank] = _Suspect(ENDED, now, rank, self._ended(vitals[rank]))
        self._look_for_silence(now, gap_s, vitals)
        self._look_for_hangs(now, gap_s, vitals, in_step=in_step)
        if not self._suspects:
            return None
        self._first_sign = self._first_sign or now
        cause = min(self._suspects.values())
        patience = self._patience
        grace = patience.connection_grace_s if cause.category == LOST_CONNECTION else patience.grace_s
        if now - self._first_sign < grace:
            return None
        return Diagnosis(message=cause.text, is_user_error=cause.is_user_error)

    def overview(self) -> str:
        """What every rank is doing, in one line."""
        return "; ".join(
            f"{name}{_where(vital.phase, vital.step_id)}"
            for name, vital in zip(self._names, self._vitals.read(), strict=True)
        )

    def wait_all(self, timeout_s: float) -> bool:
        """Whether every process has ended within `timeout_s`."""
        until = time.monotonic() + timeout_s
        for process in self._processes:
            try:
                process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                return False
        return True

    def kill(self) -> None:
        """End and reap every process, stopped ones too."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        self.wait_all(KILL_TIMEOUT_S)

    def _look_for_hangs(self, now: float, gap_s: float, vitals: Sequence[RankVital], *, in_step: bool) -> None:
        found = {
            NOBODY if still.rank is None else still.rank: still.seconds
            for still in self._hangs.look(gap_s, vitals, in_step=in_step)
        }
        for rank, seconds in found.items():
            if rank in self._suspects:
                continue
            if rank == NOBODY:
                text = f"no rank has got on for {seconds:.1f} s, each waits for another: {self.overview()}"
                self._suspects[rank] = _Suspect(NOBODY_MOVES, now, rank, text)
            else:
                text = f"{self._names[rank]} hangs: it has not got on for {seconds:.1f} s"
                text += _where(vitals[rank].phase, vitals[rank].step_id)
                self._suspects[rank] = _Suspect(HANGS, now, rank, text)
        for rank, suspect in list(self._suspects.items()):
            if suspect.category in (HANGS, NOBODY_MOVES) and rank not in found:
                self._forget(rank)

    def _look_for_silence(self, now: float, gap_s: float, vitals: Sequence[RankVital]) -> None:
        for vital in vitals:
            rank = vital.rank
            if vital.heartbeat_ns != self._beats[rank]:
                self._beats[rank], self._silence_s[rank] = vital.heartbeat_ns, 0.0
                self._forget_silence(rank)
                continue
            self._silence_s[rank] += gap_s
            if self._silence_s[rank] >= self._limit(vital) and rank not in self._suspects:
                text = f"{self._names[rank]} has shown no sign of life for {self._silence_s[rank]:.1f} s, last"
                text += _where(vital.phase, vital.step_id)
                self._suspects[rank] = _Suspect(STANDS_STILL, now, rank, text)

    def _limit(self, vital: RankVital) -> float:
        patience = self._patience
        if vital.state != STARTING or _is_stopped(self._processes[vital.rank].pid):
            return patience.stall_s
        return patience.start_stall_s

    def _forget_silence(self, rank: int) -> None:
        suspect = self._suspects.get(rank)
        if suspect is not None and suspect.category == STANDS_STILL:
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        del self._suspects[rank]
        if not self._suspects:
            self._first_sign = 0.0

    def _ended(self, vital: RankVital) -> str:
        code = self._processes[vital.rank].poll()
        assert code is not None
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        if vital.state == FAILED:
            how = f"failed and {how}"
        return f"{self._names[vital.rank]} {how}{_where(vital.phase, vital.step_id)}"


def _where(phase: str, step_id: int) -> str:
    step = f" of step {step_id}" if step_id >= 0 else ""
    return f" in phase '{phase}'{step}" if phase else " before its first phase"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_stopped(pid: int) -> bool:
    """Whether the operating system has stopped the process (SIGSTOP, a debugger)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
