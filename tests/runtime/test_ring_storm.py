"""Storms over a ring: random messages, slow, late and dying readers, writers killed mid-write; 100 seeds in all."""

from __future__ import annotations

import os
import random
import time
from dataclasses import asdict
from typing import Any

import pytest

from runtime.ring import create_segment
from tests.runtime.ring_process import Report, Storm, go, report, spawned

LONGEST_STALL_S = 1.0
QUICK = range(5)  # one of each death
ALL = range(100)


def run(storm: Storm) -> list[Report | None]:
    """Reports of the writer and of each reader; None for who was killed."""
    fd = create_segment("storm", storm.capacity)
    told = asdict(storm)
    roles: list[dict[str, Any]] = [{"role": "write", "storm": told}]
    roles += [{"role": "read", "storm": told, "index": index} for index in range(len(storm.late_s))]
    try:
        with spawned(fd, *roles) as processes:
            go(processes)
            if storm.death == "any":
                time.sleep(random.Random(storm.seed).uniform(0.0, 0.2))
                processes[0].kill()
            return [report(process) for process in processes]
    finally:
        os.close(fd)


def check(storm: Storm) -> None:
    writer, *readers = run(storm)
    whole = [end for index, end in enumerate(readers) if (storm.death, index) != ("reader", storm.victim)]
    assert all(end is not None for end in whole)
    ends = [end for end in (writer, *readers) if end is not None]
    assert len({end.messages for end in ends}) == 1, "everybody who lived got every message that was sent"
    assert all(end.worst_s < LONGEST_STALL_S for end in ends), ends
    if storm.death in ("", "reader"):
        assert writer is not None
        assert {end.fault for end in whole if end} <= {"RingClosed"}
        named = f"ring 'storm': reader {storm.victim} (rank {storm.victim}) is dead"
        assert writer.text.startswith(named) if storm.death else writer.text == ""
        assert writer.messages == len(storm.sizes) or writer.fault == "ReaderDead"
    else:
        assert writer is None
        assert {end.fault for end in whole if end} == {"WriterDead"}
        assert storm.death == "any" or {end.messages for end in ends} == {storm.at}
    for index, end in enumerate(readers):
        assert end is None or f"reader {index} (rank {index})" in end.text


@pytest.mark.parametrize("seed", QUICK)
def test_quick_storms(seed: int) -> None:
    check(Storm.of(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_all_storms(seed: int) -> None:
    check(Storm.of(seed))


def test_the_storms_together_are_what_was_promised() -> None:
    storms = [Storm.of(seed) for seed in ALL]
    assert sum(len(storm.sizes) for storm in storms) == 10_000
    assert 100e6 < sum(sum(storm.sizes) for storm in storms) <= 400e6
    assert {storm.death for storm in storms} == {"", "reader", "unpublished", "half", "any"}
    assert any(any(storm.late_s) for storm in storms)
    assert any(any(storm.naps) for storm in storms)
