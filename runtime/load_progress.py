"""How far a rank has come with its weights, written into its phase for whoever watches, and read from there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from parallel.layout import Layout
from runtime.vitals import RankVital

PHASE = "loading weights"
_TEXT = re.compile(rf"{PHASE}, (\d+) of (\d+) bytes")
_OVER_TP = re.compile(
    r"(^model\.embed_tokens|^lm_head|\.embed_tokens|\.shared_head\.head|\.self_attn\.(q_proj|q_b_proj|kv_b_proj|o_proj)"
    r"|\.mlp\.(gate|up|down)_proj)\."
)


class StartupWatcher(Protocol):
    """Whoever shows how ranks come up (launch/startup_view.py)."""

    def gathering(self, num_here: int) -> None:
        """So many ranks have reported to the controller."""
        ...

    def update(self, vitals: Sequence[RankVital]) -> None:
        """What all ranks do at this moment."""
        ...


class Unwatched:
    """Nobody shows it."""

    def gathering(self, num_here: int) -> None:
        pass

    def update(self, vitals: Sequence[RankVital]) -> None:
        pass


@dataclass(frozen=True)
class Loaded:
    """Bytes of the files that a rank has read, and will have read, about."""

    done: int
    total: int


def described(done: int, total: int) -> str:
    """The phase of a rank that loads."""
    return f"{PHASE}, {done} of {total} bytes"


def parse(phase: str) -> Loaded | None:
    """What a phase says of loading; None when it is another one, or does not say how far."""
    match = _TEXT.match(phase)
    return Loaded(int(match[1]), int(match[2])) if match else None


class LoadProgress:
    """Told of every part that is read; writes the phase each time another hundredth is there."""

    def __init__(self, phase: Callable[[str], None], total: int) -> None:
        self._phase, self._total = phase, total
        self._next = 0

    def __call__(self, done: int) -> None:
        if done >= self._next:
            self._next = done + self._total // 100
            self._phase(described(min(done, self._total), self._total))


def expected_bytes(
    tensors: Iterable[tuple[str, int]], layout: Layout, *, copies: float = 1.0, skip: str | None = None
) -> int:
    """About what one rank reads of `tensors` (name, bytes): whole experts over ep, other large parts over tp.

    `copies`: places for experts to experts. `skip`: beginning of the names that are left out.
    """
    return round(sum(
        size * _share(name, layout, copies)
        for name, size in tensors
        if skip is None or not name.startswith(skip)
    ))


def _share(name: str, layout: Layout, copies: float) -> float:
    if ".experts." in name:
        return min(copies / layout.ep, 1.0)
    return 1 / layout.tp if _OVER_TP.search(name) else 1.0
