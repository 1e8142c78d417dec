"""Runs one or two halves of a step through the layers, so that one half's exchanges hide behind the other's compute.

Two halves take turns like this (one MoE layer; `>x` starts an exchange, `x>` waits for it):

    A | attention, route >tokens                           shared, tokens> experts >results
    B |                          attention, route >tokens

    A |                                    results>, next attention
    B | tokens> experts >results, shared                             results>, next attention

So tokens travel during B's attention and A's shared expert (A's) and during A's shared expert and experts (B's),
results during B's experts and shared expert (A's) and during B's shared expert and A's next attention (B's): whatever
is shorter than a stage and a shared expert is hidden, if cores and links allow.
Among all orders of these stages this one hides most over a range of costs. A half waits for two exchanges a layer,
which is the least: a layer that takes less than its half's attention, experts and two latencies cannot be had.

A leads B in every layer, which a prefill chunk cut between the halves relies on: A's entries are in the cache before
B's attention reads them. The order depends on the layers and the number of halves alone, hence equals on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from parallel.ledger import Ledger
from parallel.trace import HALF_A, HOST, WHOLE, Recorder
from runtime.models.decoder import DecoderLayer, HalfState, Stage


def run_layers(
    layers: Sequence[DecoderLayer], halves: Sequence[HalfState], ledger: Ledger | None = None,
    trace: Recorder | None = None,
) -> None:
    """Takes `halves`, one or two in the order of their tokens, through all layers; their states are updated in place.

    A half may have no tokens; it joins every collective. `ledger.half` tells which half runs, and is 0 afterwards.
    """
    assert len(halves) in (1, 2), len(halves)
    recorder = trace if trace is not None and trace.on else None
    if len(halves) == 1:
        _take_turn(chain.from_iterable(layer.stages for layer in layers), halves[0], recorder, WHOLE)
    else:
        leading = _turns([layer.stages for layer in layers])
        trailing = _turns([layer.trailing_stages for layer in layers])
        for turns in zip(leading, trailing, strict=True):
            for i, stages in enumerate(turns):
                if ledger is not None:
                    ledger.half = i
                _take_turn(stages, halves[i], recorder, HALF_A + i)
    if ledger is not None:
        ledger.half = 0


def _take_turn(stages: Iterable[Stage], half: HalfState, recorder: Recorder | None, track: int) -> None:
    if recorder is None:
        for stage in stages:
            for part in stage:
                part.run(half)
        return
    recorder.track = track
    for stage in stages:
        for part in stage:
            recorder.run(part.name, part.run, half)
    recorder.track = HOST


def _turns(layers: Sequence[tuple[Stage, ...]]) -> Iterator[tuple[Stage, ...]]:
    """What a half runs in one turn: a stage, but a layer's last with the next layer's first.

    Waiting for both halves' results before either attends would leave B's on the way with nothing to hide behind.
    """
    last: tuple[Stage, ...] = ()
    for stages in layers:
        for stage in stages[:-1]:
            yield (*last, stage)
            last = ()
        last = (stages[-1],)
    yield last
