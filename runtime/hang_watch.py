"""Ranks whose heart beats but that do nothing new: one that hangs, or all of them, each waiting for another.

Every phase and every collective moves a rank's counter on its vitals page. Only while a step is in flight does it count
when none moves, and only as long as somebody looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.vitals import RankVital

FACTOR = 4.0  # times the longest computation, or wait, between two moves that was seen to end
WAIT_FACTOR = 4.0  # times the limit that all ranks may wait at once: much data may be on its way through a slow network
FIRST_STEP_S = 60.0  # libraries compile, connect and allocate in the first step of a rank


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """`rank` has not moved for `seconds`; None: no rank has, and each of them waits."""

    rank: int | None
    seconds: float


class HangWatch:
    """`limit_s`: how long a rank may take between two moves, unless its computations were seen to take longer."""

    def __init__(self, num_ranks: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._longest_s, self._longest_wait_s = 0.0, 0.0
        self._moves = [-1] * num_ranks
        self._still_s = [0.0] * num_ranks
        self._computed = [False] * num_ranks  # whether that was in a computation, not a wait
        self._first_step: list[int | None] = [None] * num_ranks

    def look(self, gap_s: float, vitals: Sequence[RankVital], *, in_step: bool) -> list[Standstill]:
        """Who stands still, `gap_s` after the last look. `in_step`: results of a step are being waited for."""
        for vital in vitals:
            self._note(vital, gap_s if in_step else 0.0)
        hanging = [v for v in vitals if not v.is_waiting and self._still_s[v.rank] >= self._limit(v)]
        if hanging:
            return [Standstill(rank=v.rank, seconds=self._still_s[v.rank]) for v in hanging]
        if vitals and all(v.is_waiting and self._still_s[v.rank] >= self._wait_limit(v) for v in vitals):
            return [Standstill(rank=None, seconds=min(self._still_s))]
        return []

    def _note(self, vital: RankVital, gap_s: float) -> None:
        rank = vital.rank
        if self._first_step[rank] is None and vital.step_id >= 0:
            self._first_step[rank] = vital.step_id
        if vital.moves == self._moves[rank] and gap_s:
            self._still_s[rank] += gap_s
            return
        if self._is_warm(vital) and self._computed[rank]:
            self._longest_s = max(self._longest_s, self._still_s[rank])
        elif self._is_warm(vital):
            self._longest_wait_s = max(self._longest_wait_s, self._still_s[rank])
        self._moves[rank], self._still_s[rank], self._computed[rank] = vital.moves, 0.0, not vital.is_waiting

    def _is_warm(self, vital: RankVital) -> bool:
        first = self._first_step[vital.rank]
        return first is not None and vital.step_id > first

    def _limit(self, vital: RankVital) -> float:
        return max(self._limit_s, FACTOR * self._longest_s if self._is_warm(vital) else FIRST_STEP_S)

    def _wait_limit(self, vital: RankVital) -> float:
        return max(WAIT_FACTOR * self._limit_s, FACTOR * self._longest_wait_s if self._is_warm(vital) else FIRST_STEP_S)
