"""Signs of life: a shared page on which every rank writes down what it is doing, for whoever watches it.

The page stays readable when its rank is dead, stopped or stuck inside a collective. Nothing is locked: a text that is
read while it changes may be mixed, which is why decisions rest on numbers and processes, and texts only explain.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from parallel.trace import Recorder

STARTING, READY, FAILED, CLOSED = range(4)
STATE_NAMES = ("starting", "ready", "failed", "closed")

BEAT_S = 0.2  # between two heartbeats

_RECORD = 256  # bytes of one rank: whole cache lines, so that ranks do not slow each other down
_PID, _BEAT, _STEP, _STATE, _MOVES = range(5)  # 8-byte integers at the start of a record
_NUMBERS = 40  # bytes
_PHASE, _OPERATION, _END = 64, 192, 256  # where the texts begin

WAITING = b"waiting"  # phases of a rank that has nothing to do begin with it


@dataclass(frozen=True, kw_only=True)
class RankVital:
    """What one rank last wrote. `step_id` is -1 before the first step; `heartbeat_ns` is on the monotonic clock.

    `moves` counts phases and collectives: while it stays the same the rank has come no further.
    """

    rank: int
    pid: int
    heartbeat_ns: int
    step_id: int
    state: int
    phase: str  # with the collective that is waited for: "target: all_to_all on ep"
    moves: int = 0
    is_waiting: bool = False  # for a plan or inside a collective: others have to move first

    @property
    def state_name(self) -> str:
        return STATE_NAMES[self.state]


def page_size(num_ranks: int) -> int:
    """Bytes of the page for `num_ranks` ranks."""
    return num_ranks * _RECORD


def text_field(text: str, size: int = _END - _OPERATION) -> bytes:
    """`text` as it stands on the page: ASCII, cut or filled with zeros to `size` bytes."""
    return text.encode("ascii", "replace")[:size].ljust(size, b"\0")


class Vitals:
    """The reader's side, in the controller."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self._map = mmap.mmap(fd, page_size(num_ranks), prot=mmap.PROT_READ)
        self._num_ranks = num_ranks

    def read(self) -> list[RankVital]:
        """All ranks, in order."""
        return [self._one(rank) for rank in range(self._num_ranks)]

    def close(self) -> None:
        self._map.close()

    def _one(self, rank: int) -> RankVital:
        record = self._map[rank * _RECORD : (rank + 1) * _RECORD]
        pid, beat, step, state, moves = memoryview(record)[:_NUMBERS].cast("q")
        return RankVital(
            rank=rank, pid=pid, heartbeat_ns=beat, step_id=step, state=state if 0 <= state <= CLOSED else STARTING,
            phase=_described(record), moves=moves,
            is_waiting=record[_OPERATION] != 0 or record[_PHASE:].startswith(WAITING),
        )


class RankVitals:
    """The writer's side, in a rank. `start` begins the heartbeat, `close` ends it.

    What is written down here is also what a trace is made of, while somebody wants one.
    """

    def __init__(self, fd: int, rank: int) -> None:
        self.trace = Recorder()
        self._map = mmap.mmap(fd, 0)
        self._at = rank * _RECORD
        self._numbers = memoryview(self._map)[self._at : self._at + _NUMBERS].cast("q")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._numbers[_PID] = os.getpid()
        self._numbers[_STEP] = -1
        self._numbers[_STATE] = STARTING
        self.beat()

    def start(self, check: Callable[[], None] | None = None) -> None:
        """Beat from a thread of its own; `check` runs with every beat."""
        self._thread = threading.Thread(target=self._beat_on, args=(check,), name="lockstep-heartbeat", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        self._numbers[_BEAT] = time.monotonic_ns()

    def step(self, step_id: int) -> None:
        self._numbers[_STEP] = step_id
        self.trace.step = step_id

    def state(self, state: int) -> None:
        self._numbers[_STATE] = state

    def phase(self, text: str) -> None:
        """What this rank is about to do, in a few words."""
        self._map[self._at + _PHASE : self._at + _OPERATION] = text_field(text, _OPERATION - _PHASE)
        self._numbers[_MOVES] += 1
        self.trace.phase(text)

    def waiting(self, operation: bytes) -> None:
        """The collective waited for, made by `text_field`: a copy of bytes, cheap enough for every call."""
        self._map[self._at + _OPERATION : self._at + _END] = operation
        self._numbers[_MOVES] += 1

    def waited(self) -> None:
        self._map[self._at + _OPERATION] = 0
        self._numbers[_MOVES] += 1

    @property
    def in_collective(self) -> bool:
        """Whether a collective is being waited for, or ended with an exception."""
        return self._map[self._at + _OPERATION] != 0

    @property
    def described(self) -> str:
        """Phase and collective, as the reader would see them."""
        return _described(self._map[self._at : self._at + _RECORD])

    def close(self) -> None:
        """End the heartbeat. What was written stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._numbers.release()
        self._map.close()

    def _beat_on(self, check: Callable[[], None] | None) -> None:
        while not self._stop.wait(BEAT_S):
            self.beat()
            if check is not None:
                check()


def _described(record: bytes) -> str:
    phase, operation = _text(record[_PHASE:_OPERATION]), _text(record[_OPERATION:_END])
    return f"{phase}: {operation}" if operation else phase


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("ascii", "replace")
