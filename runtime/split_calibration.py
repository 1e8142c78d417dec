"""From how many tokens on it pays to run a step as two halves: measured before serving, with real steps.

Two halves hide exchanges behind compute, but they read all weights twice. Which of the two counts for more depends on
model, machine, network and batch, so decode steps of several batch sizes are run with the split and without it, by
turns, through the engine's own path. What is measured is a number of the planner's; the decision stays in the plan.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.config import padded_rows
from runtime.engine import Engine
from runtime.request import GenerateRequest, SamplingParams
from runtime.step_planner import NEVER

GAIN = 0.03  # what two halves must save: less may be noise, and a step that is split wrongly costs every user
ROUNDS = 3  # of a block of steps without the split and one with it
BLOCK = 3  # steps of a block; the first, in which steps of the block before may still be on their way, does not count
BUDGET_S = 4.0  # no further batch size is begun after that, and none gets more than half of it where steps are slow
PROMPT_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class SplitPoint:
    """Steps of one size: `num_tokens` a rank, and the seconds that one takes whole and as two halves."""

    num_tokens: int
    whole_s: float
    halves_s: float

    @property
    def pays(self) -> bool:
        return self.halves_s < (1 - GAIN) * self.whole_s


def choose_threshold(points: Sequence[SplitPoint]) -> int:
    """The least size measured from which on the split always pays; NEVER if it does not for the largest."""
    threshold = NEVER
    for point in sorted(points, key=lambda point: -point.num_tokens):
        if not point.pays:
            break
        threshold = point.num_tokens
    return threshold


def describe(threshold: int, points: Sequence[SplitPoint]) -> str:
    """One line with the choice and the figures behind it."""
    figures = ", ".join(
        f"{p.num_tokens}: {1e3 * p.whole_s:.1f} / {1e3 * p.halves_s:.1f}"
        for p in sorted(points, key=lambda point: point.num_tokens)
    )
    choice = "at no size measured" if threshold == NEVER else f"from {threshold} tokens a rank on"
    return f"two halves {choice} (tokens a rank: ms a step whole / in two halves: {figures})"


def wants_calibration(engine: Engine) -> bool:
    """Whether the configuration leaves the threshold open, and there is more than one rank."""
    config = engine.config
    return config.split == "auto" and config.split_min_tokens is None and config.layout.ep > 1


def calibrate_split(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> str | None:
    """Measure and set the planner's threshold, on an engine without requests; the line for the log.

    None, and nothing done, where nothing is left open.
    """
    if not wants_calibration(engine):
        return None
    assert not engine.has_work()
    points = StepTimer(engine, clock).search()
    engine.planner.split_min_tokens = threshold = choose_threshold(points)
    return describe(threshold, points)


class StepTimer:
    """Times decode steps of an engine without other requests, whole and as two halves. Leaves it without work."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float] = time.perf_counter, *, rounds: int = ROUNDS
    ) -> None:
        self._engine, self._clock, self._rounds = engine, clock, rounds
        self._layout, self._k = engine.config.layout, engine.config.k
        self._rng = random.Random(0)
        self._num_rows = 0  # requests of each group
        self._began = clock()

    def length(self, rows: int) -> int:
        """Tokens of a request that is measured among `rows` of each dp group, if every draft is accepted.

        The first goes on while the last ones' prompts are taken in, and must be there to the end: a batch that shrinks
        meanwhile favours what is measured last.
        """
        config = self._engine.config
        room = min(config.prefill_chunk_size, config.capacity * config.tp - padded_rows(rows) * (1 + self._k))
        admitting = -(-rows * PROMPT_TOKENS // room)  # steps
        return PROMPT_TOKENS + (2 + admitting + 2 * (1 + self._rounds) * BLOCK) * (1 + self._k)

    def search(self) -> list[SplitPoint]:
        """Of the largest batch, and of those met on the way to the smallest for which the split pays.

        Where it does not pay for the largest, it does not for smaller ones. Empty where no batch has room.
        """
        largest = self._largest()
        sizes = [largest >> i for i in range(largest.bit_length())]  # the largest, half of it, ... 1
        if not sizes:
            return []
        points = [self.point(sizes[0])]
        pays, does_not = 0, len(sizes)  # places in `sizes`
        i = len(sizes) - 1
        while points[0].pays and i > pays and self._clock() - self._began < BUDGET_S:
            points.append(self.point(sizes[i]))
            pays, does_not = (i, does_not) if points[-1].pays else (pays, i)
            i = (pays + does_not) // 2
        return points

    def point(self, rows: int) -> SplitPoint:
        """With `rows` requests in each dp group."""
        whole, halves = self.times(rows)
        return SplitPoint(
            num_tokens=-(-rows * (1 + self._k) // self._layout.tp), whole_s=statistics.median(whole),
            halves_s=statistics.median(halves),
        )

    def times(self, rows: int) -> tuple[list[float], list[float]]:
        """Seconds of single steps with `rows` requests in each dp group: whole, and as two halves."""
        try:
            self.start(rows)
            return self._blocks()
        finally:
            self.end()

    def end(self) -> None:
        """Leave the engine without work."""
        for index in range(self._num_rows * self._layout.dp):
            self._engine.abort(_name(index))
        self._num_rows = 0
        while self._engine.has_work():
            self._engine.step()

    def start(self, rows: int) -> None:
        """Admit so many requests to every group, and run until all of them decode."""
        self._engine.planner.split_min_tokens = NEVER
        self._num_rows = rows
        for index in range(rows * self._layout.dp):  # the planner deals them out in turn
            prompt = tuple(self._rng.randrange(self._engine.facts.vocab_size) for _ in range(PROMPT_TOKENS))
            sampling = SamplingParams(max_tokens=self.length(rows) - PROMPT_TOKENS, ignore_eos=True)
            self._engine.submit(GenerateRequest(request_id=_name(index), prompt_token_ids=prompt, sampling=sampling))
        waiting = {_name(index) for index in range(rows * self._layout.dp)}
        while waiting:
            waiting -= {chunk.request_id for chunk in self._engine.step()}

    def _largest(self) -> int:
        """How many requests a group can run at once, from their first step to the last."""
        rows = self._engine.config.max_num_seqs
        while rows and not self._have_room(rows):
            rows -= 1
        return rows

    def _have_room(self, rows: int) -> bool:
        sizes, length = self._engine.sizes, self.length(rows)
        pages = -(-length // self._engine.config.page_size)
        return length < sizes.max_model_len and rows * pages < sizes.num_pages

    def _blocks(self) -> tuple[list[float], list[float]]:
        """Seconds of steps without the split and with it, by turns."""
        begin = self._clock()
        for split_min_tokens in (NEVER, 1):  # the first steps of a size are slower
            self._engine.planner.split_min_tokens = split_min_tokens
            self._engine.step()
        affordable = int(BUDGET_S / 2 / BLOCK / max(self._clock() - begin, 1e-9))
        whole: list[float] = []
        halves: list[float] = []
        for _ in range(min(max(affordable, 1), self._rounds)):
            whole += self._block(NEVER)
            halves += self._block(1)
        return whole, halves

    def _block(self, split_min_tokens: int) -> list[float]:
        """Seconds of each step of a block that counts."""
        self._engine.planner.split_min_tokens = split_min_tokens
        times = []
        for _ in range(BLOCK):
            begin = self._clock()
            self._engine.step()
            times.append(self._clock() - begin)
        return times[1:]


def _name(index: int) -> str:
    return f"split calibration {index}"
