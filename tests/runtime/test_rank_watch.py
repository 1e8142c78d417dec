"""Who is blamed when several ranks show trouble, and what is no trouble at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from parallel.layout import Layout
from runtime import rank_watch
from runtime.rank_messages import Cause, Failure
from runtime.rank_watch import Diagnosis, Patience, RankWatch, rank_names
from runtime.vitals import READY, RankVitals, Vitals, page_size, text_field
from tests.runtime.served_threads import FakeProcess


class Scene:
    """Three ranks in step 7, a clock that only moves when told, and everybody's heart beating unless silent."""

    def __init__(self, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(rank_watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.processes = [FakeProcess() for _ in range(3)]
        self.ranks = [RankVitals(page, rank) for rank in range(3)]
        for vitals in self.ranks:
            vitals.phase("target")
            vitals.step(7)
            vitals.state(READY)
        self.silent: set[int] = set()
        self.watch = RankWatch(rank_names(Layout(dp=3)), self.processes, Vitals(page, 3), Patience())

    def pass_time(
        self, seconds: float, *, in_step: bool = False, moving: Sequence[int] = ()
    ) -> Diagnosis | None:
        """Look every 50 ms for so long, or until there is a diagnosis."""
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            for rank, vitals in enumerate(self.ranks):
                if rank not in self.silent:
                    vitals.beat()
                if rank in moving:
                    vitals.phase("target")
            diagnosis = self.watch.look(self.watch.exited(), in_step=in_step)
            if diagnosis is not None:
                return diagnosis
        return None

    def fail(self, rank: int, cause: Cause = "other", after: float = 0.0) -> None:
        self.watch.report(rank, Failure(
            error=f"Error of {rank}", phase="target", step_id=7, time_ns=int((self.now + after) * 1e9), cause=cause
        ))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    page = os.memfd_create("lockstep-test-page")
    os.ftruncate(page, page_size(3))
    scene = Scene(page, monkeypatch)
    os.close(page)
    yield scene
    for vitals in scene.ranks:
        vitals.close()


def message(diagnosis: Diagnosis | None) -> str:
    assert diagnosis is not None
    return diagnosis.message


def die(rank: int, code: int) -> Callable[[Scene], None]:
    def apply(scene: Scene) -> None:
        scene.processes[rank].code = code

    return apply


def fall_silent(rank: int) -> Callable[[Scene], None]:
    return lambda scene: scene.silent.add(rank)


def fail(rank: int, cause: Cause = "other", after: float = 0.0) -> Callable[[Scene], None]:
    return lambda scene: scene.fail(rank, cause, after)


def test_nothing_is_wrong_with_ranks_that_live(scene: Scene) -> None:
    assert scene.pass_time(10) is None


@pytest.mark.parametrize(
    ("events", "blamed"),
    [
        ([die(1, -9)], "rank 1 (dp 1, tp 0) was killed by SIGKILL in phase 'target' of step 7"),
        ([die(2, -11)], "rank 2 (dp 2, tp 0) was killed by SIGSEGV in phase 'target' of step 7"),
        ([die(0, 3)], "rank 0 (dp 0, tp 0) exited with code 3 in phase 'target' of step 7"),
        ([die(0, 0)], "rank 0 (dp 0, tp 0) exited with code 0 in phase 'target' of step 7"),
        ([fail(1)], "rank 1 (dp 1, tp 0) failed in phase 'target' of step 7: Error of 1"),
        ([fail(0, "communication"), fail(2, "communication"), die(1, -9)], "rank 1 (dp 1, tp 0) was killed by SIGKILL"),
        ([fail(0, "communication", -1), fail(2)], "rank 2 (dp 2, tp 0) failed"),
        ([fail(0), fail(2, after=-0.1)], "rank 2 (dp 2, tp 0) failed"),
        ([fail(2, "communication"), fail(0, "communication", 0.1)], "rank 2 (dp 2, tp 0) failed"),
        ([fail(1), die(1, 1)], "rank 1 (dp 1, tp 0) failed in phase 'target' of step 7: Error of 1"),
        ([fail(0), die(0, 1), fail(1, "communication"), die(1, 1)], "rank 0 (dp 0, tp 0) failed"),
    ],
)  # fmt: skip
def test_the_cause_is_named(scene: Scene, events: list[Callable[[Scene], None]], blamed: str) -> None:
    for order in (events, events[::-1]):
        for event in order:
            event(scene)
    assert message(scene.pass_time(1.5)).startswith(blamed)


def test_silence_counts_after_a_while_and_is_the_cause_of_lost_connections(scene: Scene) -> None:
    fall_silent(1)(scene)
    assert scene.pass_time(2.4) is None
    fail(0, "communication")(scene)
    expected = "rank 1 (dp 1, tp 0) has shown no sign of life for 2.5 s, last in phase 'target' of step 7"
    assert message(scene.pass_time(1.0)) == expected


def test_a_rank_that_beats_again_within_the_grace_period_is_forgiven(scene: Scene) -> None:
    fall_silent(1)(scene)
    assert scene.pass_time(2.6) is None
    scene.silent.clear()
    assert scene.pass_time(5) is None


def test_a_watcher_that_was_away_does_not_blame_the_ranks_for_it(scene: Scene) -> None:
    """Nobody looks between requests, and a suspended machine stops everybody."""
    assert scene.pass_time(1) is None
    scene.now += 60
    scene.silent = {0, 1, 2}
    assert scene.pass_time(2) is None
    scene.silent.clear()
    assert scene.pass_time(5) is None


def test_a_starting_rank_may_be_silent_for_long_unless_it_is_stopped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.ranks[2].state(0)
    fall_silent(2)(scene)
    assert scene.pass_time(60) is None
    monkeypatch.setattr(rank_watch, "_is_stopped", lambda pid: True)
    assert message(scene.pass_time(1)).startswith("rank 2 (dp 2, tp 0) has shown no sign of life for 60.")


def test_a_death_during_the_grace_period_of_another_sign_wins(scene: Scene) -> None:
    fail(0)(scene)
    assert scene.pass_time(0.2) is None
    die(2, -9)(scene)
    assert "rank 2 (dp 2, tp 0) was killed by SIGKILL" in message(scene.pass_time(1))


def test_lost_connections_alone_are_given_longer_to_find_a_cause(scene: Scene) -> None:
    fail(0, "communication")(scene)
    assert scene.pass_time(0.8) is None
    assert message(scene.pass_time(1)).startswith("rank 0 (dp 0, tp 0) failed")


def test_a_users_mistake_is_marked_and_carries_no_phase(scene: Scene) -> None:
    fail(1, "user")(scene)
    diagnosis = scene.pass_time(1)
    assert diagnosis == Diagnosis(message="rank 1 (dp 1, tp 0): Error of 1", is_user_error=True)


def test_killing_reaches_everybody_who_lives(scene: Scene) -> None:
    die(1, -9)(scene)
    scene.watch.kill()
    assert [process.killed for process in scene.processes] == [True, False, True]


def warm_up(scene: Scene) -> None:
    """A first step has come and gone, and everybody is in the second."""
    assert scene.pass_time(0.2, in_step=True, moving=range(3)) is None
    for vitals in scene.ranks:
        vitals.step(8)
    assert scene.pass_time(0.2, in_step=True, moving=range(3)) is None


def test_a_rank_that_beats_but_does_not_get_on_hangs(scene: Scene) -> None:
    warm_up(scene)
    for rank in (0, 2):
        scene.ranks[rank].waiting(text_field("all_to_all on ep"))
    assert scene.pass_time(2.3, in_step=True) is None
    found = scene.pass_time(1.0, in_step=True)
    assert message(found).startswith("rank 1 (dp 1, tp 0) hangs: it has not got on for 2.")
    assert message(found).endswith("in phase 'target' of step 8")


def test_ranks_that_all_wait_for_each_other_are_told(scene: Scene) -> None:
    warm_up(scene)
    for vitals in scene.ranks:
        vitals.waiting(text_field("all_to_all on ep"))
    assert scene.pass_time(9.8, in_step=True) is None
    found = message(scene.pass_time(1.0, in_step=True))
    assert found.startswith("no rank has got on for 10.")
    assert "rank 2 (dp 2, tp 0) in phase 'target: all_to_all on ep' of step 8" in found


def test_getting_on_again_is_forgiven(scene: Scene) -> None:
    warm_up(scene)
    assert scene.pass_time(2.6, in_step=True, moving=(0, 2)) is None
    assert scene.pass_time(5.0, in_step=True, moving=range(3)) is None


@pytest.mark.parametrize("in_step", [True, False])
def test_nobody_hangs_between_steps_or_in_the_first(scene: Scene, in_step: bool) -> None:
    assert scene.pass_time(50.0, in_step=in_step) is None


def test_computations_that_were_seen_to_take_long_may(scene: Scene) -> None:
    """Four times the longest that ended; time in a wait says nothing about it."""
    warm_up(scene)
    assert scene.pass_time(2.0, in_step=True) is None
    assert scene.pass_time(0.1, in_step=True, moving=range(3)) is None
    assert scene.pass_time(7.0, in_step=True, moving=(0, 1)) is None
    assert message(scene.pass_time(2.0, in_step=True, moving=(0, 1))).startswith("rank 2 (dp 2, tp 0) hangs")


def test_long_waits_do_not_make_it_patient(scene: Scene) -> None:
    warm_up(scene)
    scene.ranks[1].waiting(text_field("all_to_all on ep"))
    assert scene.pass_time(10.0, in_step=True, moving=(0, 2)) is None
    scene.ranks[1].waited()
    assert message(scene.pass_time(3.0, in_step=True, moving=(0, 2))).startswith("rank 1 (dp 1, tp 0) hangs")


def test_waits_of_all_that_were_seen_to_take_long_may(scene: Scene) -> None:
    """Much data on a slow network is no deadlock."""
    warm_up(scene)
    for _ in range(2):
        for vitals in scene.ranks:
            vitals.waiting(text_field("all_to_all on ep"))
        assert scene.pass_time(8.0, in_step=True) is None
        for vitals in scene.ranks:
            vitals.waited()
        assert scene.pass_time(0.1, in_step=True, moving=range(3)) is None
    for vitals in scene.ranks:
        vitals.waiting(text_field("all_to_all on ep"))
    assert scene.pass_time(30.0, in_step=True) is None
    assert message(scene.pass_time(4.0, in_step=True)).startswith("no rank has got on for 3")
