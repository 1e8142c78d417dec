"""Start-up as a person follows it: a line for each phase over all ranks, live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TextIO

from launch.rank_env import rank_set
from runtime.load_progress import PHASE, Loaded, parse
from runtime.vitals import READY, RankVital

REFRESH_S = 0.2  # between two changes of a live line
PLAIN_S, PLAIN_SHARE = 10.0, 0.05  # between two plain lines of one phase: this long, or this much of it,
PLAIN_LEAST_S = 1.0  # but never less than this
_GIB = 1 << 30


class StartupView:
    """Told what ranks write on their vitals page; writes to `out`. Phases are shown in the order in which they begin.

    A phase is over when every rank has gone past it. `close` leaves the terminal on a new line.
    """

    def __init__(self, num_ranks: int, out: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_ranks, self._out, self._clock = num_ranks, out, clock
        self._is_live = out.isatty()
        self._began: dict[str, float] = {}  # phase -> when its first rank was seen in it, in order
        self._reached = [-1] * num_ranks  # the last phase of each rank, as an index into `_began`
        self._loaded: dict[int, Loaded] = {}
        self._done = 0  # phases that are over
        self._written = 0.0 if self._is_live else self._clock()
        self._written_share = 0.0
        self._width = 0  # of the live line
        self._is_over = False
        self._num_here = -1

    def gathering(self, num_here: int) -> None:
        """How many ranks have reported to the controller, which may wait for long: told where it changes."""
        if self._is_over or num_here == self._num_here:
            return
        self._num_here = num_here
        self._begin("waiting for ranks")
        if num_here >= self._num_ranks:
            self._reached = [max(index, 0) for index in self._reached]
        self._show(f"{num_here} of {self._num_ranks} here", num_here / self._num_ranks, force=False)

    def update(self, vitals: Sequence[RankVital]) -> None:
        """What all ranks do at this moment. After `close` nothing is shown: ranks that come up again are no start."""
        if self._is_over:
            return
        for vital in vitals:
            self._note(vital)
        while self._done < min(self._reached):
            self._finish()
        names = list(self._began)
        if self._done < len(names) and not all(vital.state >= READY for vital in vitals):
            text, share = self._described(names[self._done])
            self._show(text, share, force=False)

    def ready(self) -> None:
        """All ranks have loaded, whatever their vitals, which may come late from other hosts, said last."""
        self._reached = [len(self._began)] * self._num_ranks
        self.close()

    def close(self) -> None:
        """Start-up is over, well or not: leave whole lines. May be called twice."""
        self._is_over = True
        while self._done < len(self._began):
            self._finish()

    def _note(self, vital: RankVital) -> None:
        loaded = parse(vital.phase)
        if loaded is not None:
            self._loaded[vital.rank] = loaded
        if vital.state >= READY:
            self._reached[vital.rank] = len(self._began)
            return
        name = PHASE if loaded is not None else vital.phase.partition(":")[0]
        if name:
            self._begin(name)
            self._reached[vital.rank] = max(self._reached[vital.rank], list(self._began).index(name))

    def _begin(self, name: str) -> None:
        self._began.setdefault(name, self._clock())

    def _described(self, name: str) -> tuple[str, float]:
        """The line of a phase, and how much of it is done, 0..1."""
        past = sum(index > self._done for index in self._reached)
        if name == PHASE and self._loaded:
            return self._described_loading(past)
        behind = [rank for rank, index in enumerate(self._reached) if index <= self._done]
        text = f"{past} of {self._num_ranks} done"
        if past and behind:
            text += f", not {rank_set(behind)}"
        return text, past / self._num_ranks

    def _described_loading(self, past: int) -> tuple[str, float]:
        """Bytes of bytes, rate, slowest rank; a rank that went past has read what it had to."""
        done = total = 0
        shares: list[tuple[float, int]] = []
        for rank, index in enumerate(self._reached):
            loaded = self._loaded.get(rank, Loaded(0, 0))
            size = loaded.total or max(other.total for other in self._loaded.values())
            read = size if index > self._done else loaded.done
            done, total = done + read, total + size
            shares.append((read / max(size, 1), rank))
        elapsed = max(self._clock() - self._began[PHASE], 1e-3)
        slowest, rank = min(shares)
        rate, share = round(done / elapsed), done / max(total, 1)
        text = f"{_bytes(done)} of {_bytes(total)} ({_percent(share)}), {_bytes(rate)}/s"
        left_s = (total - done) * elapsed / done if done else 0.0
        if past < self._num_ranks:
            text += f", {left_s:.0f} s left" if done else ""
            text += f", slowest {rank_set([rank])} {_percent(slowest)}" if self._num_ranks > 1 else ""
        return text, share

    def _finish(self) -> None:
        """Leave the line of the phase that is over, with how long it took."""
        name = list(self._began)[self._done]
        past = sum(index > self._done for index in self._reached)
        text, share = self._described(name)
        if name != PHASE or not self._loaded:
            text = f"{past} of {self._num_ranks} done"
        self._show(f"{text}, {self._clock() - self._began[name]:.1f} s", share, force=True)
        if self._is_live:
            self._out.write("\n")
            self._out.flush()
        self._done += 1
        self._written, self._written_share, self._width = 0.0 if self._is_live else self._clock(), 0.0, 0

    def _show(self, text: str, share: float, *, force: bool) -> None:
        name = list(self._began)[self._done] if self._done < len(self._began) else ""
        line = f"lockstep: {name}: {text}"
        now = self._clock()
        if self._is_live:
            if force or now - self._written >= REFRESH_S:
                self._out.write("\r" + line.ljust(self._width))
                self._out.flush()
                self._written, self._width = now, max(self._width, len(line))
        elif force or now - self._written >= PLAIN_S or self._has_moved(now, share):
            self._out.write(line + "\n")
            self._out.flush()
            self._written, self._written_share = now, share

    def _has_moved(self, now: float, share: float) -> bool:
        return share >= self._written_share + PLAIN_SHARE and now - self._written >= PLAIN_LEAST_S


def _bytes(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / (1 << 20):.1f} MiB"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
