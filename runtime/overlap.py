"""Runs one or two halves of a step through the layers, so that one half's exchanges hide behind the other's compute.

Two halves take turns like this (one MoE layer; `>x` starts an exchange, `x>` waits for it):

    A | attention, route >counts                    counts> >tokens, shared
    B |                           attention, route >counts                   shared, counts> >tokens

    A | tokens> experts >results                             results>, next attention
    B |                           tokens> experts >results                             results>, next attention

So counts travel during B's attention (A's) and both shared experts (B's), tokens during both shared experts (A's) and
A's experts (B's), results during B's experts (A's) and A's next attention (B's). Among all orders of these stages this
one hides most over a range of costs. With a back end of fixed shape the tokens leave at `>counts` and nothing of an
exchange shorter than a stage stays visible; without a shared expert the exact back end's tokens of A do.

A leads B in every layer, which a prefill chunk cut between the halves relies on: A's entries are in the cache before
B's attention reads them. The order depends on the layers and the number of halves alone, hence equals on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel.ledger import Ledger
from runtime.models.decoder import DecoderLayer, HalfState, Stage


def run_layers(layers: Sequence[DecoderLayer], halves: Sequence[HalfState], ledger: Ledger | None = None) -> None:
    """Takes `halves`, one or two in the order of their tokens, through all layers; their states are updated in place.

    A half may have no tokens; it joins every collective. `ledger.half` tells which half runs, and is 0 afterwards.
    """
    assert len(halves) in (1, 2), len(halves)
    if len(halves) == 1:
        for layer in layers:
            layer.run(halves[0])
        return
    leading = _turns([layer.stages for layer in layers])
    trailing = _turns([layer.trailing_stages for layer in layers])
    for turns in zip(leading, trailing, strict=True):
        for i, stages in enumerate(turns):
            if ledger is not None:
                ledger.half = i
            for stage in stages:
                stage(halves[i])
    if ledger is not None:
        ledger.half = 0


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
