"""The signal that ends waits, and the group that outlives what it exchanges through."""

from __future__ import annotations

import select
import threading

import pytest
import torch

from parallel.abort import Aborted, AbortSignal
from parallel.group import SoloGroup
from parallel.switch_group import SwitchGroup
from tests.parallel.test_group import check, exercise


def state(signal: AbortSignal) -> tuple[bool, bool]:
    return signal.is_set, readable(signal)


def readable(signal: AbortSignal) -> bool:
    return bool(select.select([signal], [], [], 0)[0])


def test_set_and_clear() -> None:
    signal = AbortSignal()
    signal.clear()  # nothing to clear
    assert state(signal) == (False, False)
    signal.raise_if_set()
    for _ in range(3):
        signal.set()
    assert state(signal) == (True, True)
    with pytest.raises(Aborted, match="called off"):
        signal.raise_if_set()
    assert state(signal) == (True, True)  # whoever looks does not take it away from others
    signal.clear()
    assert state(signal) == (False, False)
    signal.close()


def test_another_thread_wakes_from_a_select() -> None:
    signal = AbortSignal()
    timer = threading.Timer(0.05, signal.set)
    timer.start()
    assert select.select([signal], [], [], 10)[0]
    timer.join()
    signal.close()


def test_a_switch_passes_everything_on() -> None:
    group = SwitchGroup("ep", 0, 1)
    group.use(SoloGroup("ep"))
    check([exercise(group)])


def test_between_epochs_nothing_is_exchanged() -> None:
    group = SwitchGroup("ep", 0, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ep: the ranks of this group are not connected"):
            group.all_gather(torch.zeros(1))
        group.use(SoloGroup("ep"))
        assert len(group.all_gather(torch.zeros(1)).wait()) == 1
        group.use(None)


@pytest.mark.parametrize(("name", "rank", "size"), [("tp", 0, 1), ("ep", 0, 2), ("ep", 1, 2)])
def test_a_group_of_another_place_is_refused(name: str, rank: int, size: int) -> None:
    group = SwitchGroup(name, rank, size)
    with pytest.raises(ValueError, match=f"ep with rank 0 of 1 in the place of {name} with rank {rank} of {size}"):
        group.use(SoloGroup("ep"))
