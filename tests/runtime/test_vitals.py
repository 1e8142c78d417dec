"""The vitals page: what a rank writes is what the watcher reads, rank by rank, whatever the rank is stuck in."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from parallel.group import PendingRows, ReadyRows, SoloGroup
from parallel.layout import Layout, RankGroups
from runtime.vitals import CLOSED, FAILED, READY, STARTING, RankVitals, Vitals, page_size, text_field
from runtime.watched_group import watch_groups
from tests.thread_group import run_ranks


@pytest.fixture
def page() -> Iterator[int]:
    fd = os.memfd_create("lockstep-test-vitals")
    os.ftruncate(fd, page_size(3))
    yield fd
    os.close(fd)


def test_what_is_written_is_read_and_only_in_its_place(page: int) -> None:
    reader = Vitals(page, 3)
    untouched = reader.read()
    writer = RankVitals(page, 1)
    writer.step(12)
    writer.phase("target")
    writer.state(READY)
    first, vital, last = reader.read()
    assert (first, last) == (untouched[0], untouched[2])
    assert (vital.rank, vital.pid, vital.step_id) == (1, os.getpid(), 12)
    assert (vital.state_name, vital.phase) == ("ready", "target")
    assert vital.heartbeat_ns > 0
    for state, name in ((STARTING, "starting"), (FAILED, "failed"), (CLOSED, "closed")):
        writer.state(state)
        assert reader.read()[1].state_name == name
    writer.close()
    assert reader.read()[1].phase == "target", "the last words stay"
    reader.close()


def test_before_the_first_step_there_is_none(page: int) -> None:
    writer = RankVitals(page, 0)
    assert Vitals(page, 3).read()[0].step_id == -1
    writer.close()


def test_texts_are_cut_and_replaced_whole(page: int) -> None:
    reader, writer, neighbour = Vitals(page, 3), RankVitals(page, 0), RankVitals(page, 1)
    neighbour.phase("quiet")
    writer.phase("x" * 500)
    writer.waiting(text_field("y" * 500))
    assert reader.read()[0].phase == f"{'x' * 128}: {'y' * 64}"
    assert reader.read()[1].phase == "quiet"
    writer.phase("größer")
    writer.waited()
    assert reader.read()[0].phase == "gr??er"
    writer.close()
    neighbour.close()


def test_the_heart_beats_and_the_check_runs_until_it_is_closed(page: int) -> None:
    writer, reader = RankVitals(page, 2), Vitals(page, 3)
    beats = threading.Semaphore(0)
    before = reader.read()[2].heartbeat_ns
    writer.start(beats.release)
    assert beats.acquire(timeout=30)
    assert beats.acquire(timeout=30)
    assert reader.read()[2].heartbeat_ns > before
    writer.close()
    after = reader.read()[2].heartbeat_ns
    assert not beats.acquire(timeout=0.5)
    assert reader.read()[2].heartbeat_ns == after


class _Look:
    """A group whose operations note what the page says while they are under way."""

    name, rank, size = "ep", 0, 2

    def __init__(self, seen: list[str], vitals: RankVitals) -> None:
        self._seen, self._vitals = seen, vitals

    def _look(self, x: Tensor, send: object = None, receive: object = None) -> _Look:
        self._seen.append(self._vitals.described)
        return self

    def wait(self) -> Tensor:
        self._seen.append(self._vitals.described)
        return torch.zeros(1)

    all_gather = reduce_scatter = all_to_all = all_to_all_uneven = _look

    def all_to_all_sized(self, x: Tensor, send: object, most: int) -> PendingRows:
        return ReadyRows(self._look(x).wait(), [])


def test_a_collective_is_on_the_page_while_it_is_waited_for(page: int) -> None:
    vitals, seen = RankVitals(page, 0), list[str]()
    vitals.phase("target")
    group = watch_groups(RankGroups(tp=SoloGroup("tp"), ep=_Look(seen, vitals)), vitals).ep
    x = torch.zeros(2)
    uneven = partial(group.all_to_all_uneven, send=[1, 1], receive=[2, 0])
    for start in (group.all_gather, group.reduce_scatter, group.all_to_all, uneven):
        pending = start(x)
        assert vitals.described == "target", "started is not waited for"
        pending.wait()
        assert vitals.described == "target"
        assert not vitals.in_collective
    names = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_uneven")
    assert seen == [f"target: {name} on ep" for name in names for _ in ("start", "wait")]
    vitals.close()


def test_the_note_stays_when_a_collective_raises(page: int) -> None:
    class Torn(_Look):
        def wait(self) -> Tensor:
            raise RuntimeError("connection closed")

    vitals = RankVitals(page, 0)
    group = watch_groups(RankGroups(tp=SoloGroup("tp"), ep=Torn([], vitals)), vitals).ep
    vitals.phase("drafter")
    with pytest.raises(RuntimeError, match="connection closed"):
        group.all_to_all(torch.zeros(2)).wait()
    assert vitals.in_collective
    assert Vitals(page, 3).read()[0].phase == "drafter: all_to_all on ep"
    vitals.close()


def test_watched_groups_give_the_results_of_the_groups_and_leave_lone_ranks_alone(page: int) -> None:
    def work(rank: int, groups: RankGroups) -> tuple[Tensor, bool]:
        vitals = RankVitals(page, rank)
        watched = watch_groups(groups, vitals)
        result = watched.tp.all_gather(torch.full((1,), rank)).wait()
        unchanged = watch_groups(RankGroups(tp=SoloGroup("tp"), ep=groups.ep), vitals)
        vitals.close()
        return result, isinstance(unchanged.tp, SoloGroup)

    for result, is_solo in run_ranks(Layout(tp=2), work):
        assert result.tolist() == [0, 1]
        assert is_solo
