"""Runs one or two halves of a step through the layers, so that one half's exchanges hide behind the other's compute.

For two halves the stages of a MoE layer run as

    A: attention, routing | B: the same | A: send | B: send | A: experts | B: experts | A: recv, next attention | B: ...

Every bar is a point where something that the half on its left has just started travels while the next one computes.
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
    for block in _blocks(layers):
        for i, half in enumerate(halves):
            if ledger is not None:
                ledger.half = i
            for stage in block:
                stage(half)
    if ledger is not None:
        ledger.half = 0


def _blocks(layers: Sequence[DecoderLayer]) -> Iterator[tuple[Stage, ...]]:
    """Stages that a half runs in one go: each alone, but a layer's last with the next layer's first.

    Waiting for both halves' results before either attends would leave B's on the way with nothing to hide behind.
    """
    last: tuple[Stage, ...] = ()
    for layer in layers:
        for stage in layer.stages[:-1]:
            yield (*last, stage)
            last = ()
        last = (layer.stages[-1],)
    yield last
