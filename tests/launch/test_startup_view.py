"""The lines of start-up: bytes of bytes, rate and slowest rank, live on a terminal and few elsewhere."""

from __future__ import annotations

from io import StringIO

from launch.startup_view import StartupView
from runtime.load_progress import described
from runtime.vitals import READY, STARTING, RankVital

MIB = 1 << 20


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def vitals(*phases: str, ready: tuple[int, ...] = ()) -> list[RankVital]:
    return [
        RankVital(
            rank=rank, pid=1, heartbeat_ns=0, step_id=-1, state=READY if rank in ready else STARTING, phase=phase
        )
        for rank, phase in enumerate(phases)
    ]


def loading(done: int, total: int = 100) -> str:
    return described(done * MIB, total * MIB)


def test_elsewhere_than_on_a_terminal_a_line_ends_each_phase() -> None:
    out, clock = StringIO(), Clock()
    view = StartupView(2, out, clock=clock)
    view.update(vitals("importing libraries", "importing libraries"))
    clock.now += 2
    view.update(vitals(loading(0), "importing libraries"))
    view.update(vitals(loading(3), loading(0)))
    clock.now += 1
    view.update(vitals(loading(60), loading(20)))
    clock.now += 1
    view.update(vitals("waiting for the start", loading(98)))
    view.update(vitals("waiting for the start", "waiting for the start", ready=(0, 1)))
    view.close()
    assert out.getvalue().splitlines() == [
        "lockstep: importing libraries: 1 of 2 done, not [r1]",
        "lockstep: importing libraries: 2 of 2 done, 2.0 s",
        "lockstep: loading weights: 80.0 MiB of 200.0 MiB (40 %), 80.0 MiB/s, 2 s left, slowest [r1] 20 %",
        "lockstep: loading weights: 198.0 MiB of 200.0 MiB (99 %), 99.0 MiB/s, 0 s left, slowest [r1] 98 %",
        "lockstep: loading weights: 200.0 MiB of 200.0 MiB (100 %), 100.0 MiB/s, 2.0 s",
        "lockstep: waiting for the start: 2 of 2 done, 0.0 s",
    ]


def test_lines_of_one_phase_are_5_percent_or_10_seconds_apart() -> None:
    out, clock = StringIO(), Clock()
    view = StartupView(1, out, clock=clock)
    for percent in range(101):
        view.update(vitals(loading(percent)))
        clock.now += 1
    before = len(out.getvalue().splitlines())
    assert 17 <= before <= 20
    for percent in range(101):
        view.update(vitals(loading(percent)))
    assert len(out.getvalue().splitlines()) <= before + 1  # never more than one a second
    before = len(out.getvalue().splitlines())
    for _ in range(30):
        clock.now += 1
        view.update(vitals(loading(100)))
    assert len(out.getvalue().splitlines()) == before + 3


def test_a_terminal_shows_one_line_that_changes() -> None:
    out, clock = Terminal(), Clock()
    view = StartupView(2, out, clock=clock)
    view.gathering(1)
    clock.now += 1
    view.gathering(2)
    clock.now += 1
    view.update(vitals(loading(50), loading(25)))
    clock.now += 0.01
    view.update(vitals(loading(51), loading(25)))  # too soon for another look
    view.update(vitals("", "", ready=(0, 1)))
    view.close()
    lines = out.getvalue().split("\n")
    assert [line.count("\r") for line in lines] == [3, 2, 0]
    assert lines[0].rpartition("\r")[2].rstrip() == "lockstep: waiting for ranks: 2 of 2 done, 2.0 s"
    assert "75.0 MiB of 200.0 MiB" in lines[1]
    assert lines[1].rpartition("\r")[2].startswith("lockstep: loading weights: 200.0 MiB of 200.0 MiB (100 %)")


def test_a_shorter_line_covers_the_longer_one_before() -> None:
    out, clock = Terminal(), Clock()
    view = StartupView(2, out, clock=clock)
    view.update(vitals(loading(50), loading(25)))
    clock.now += 1
    view.update(vitals("", "", ready=(0, 1)))
    before, after = out.getvalue().rstrip("\n").split("\r")[1:]
    assert len(after) >= len(before)


def test_collectives_in_a_phase_make_no_line_of_their_own() -> None:
    out = StringIO()
    view = StartupView(1, out, clock=Clock())
    view.update(vitals("meeting the other ranks: rendezvous"))
    view.update(vitals("meeting the other ranks"))
    view.update(vitals("", ready=(0,)))
    assert out.getvalue() == "lockstep: meeting the other ranks: 1 of 1 done, 0.0 s\n"


def test_a_controller_that_waits_for_ranks_says_so_once() -> None:
    out, clock = StringIO(), Clock()
    view = StartupView(3, out, clock=clock)
    for num_here in (0, 0, 1, 1, 1, 2):
        clock.now += 20
        view.gathering(num_here)
    assert out.getvalue().splitlines() == [f"lockstep: waiting for ranks: {n} of 3 here" for n in range(3)]


def test_ranks_that_are_ready_have_read_all_whatever_was_seen_of_them() -> None:
    out = StringIO()
    view = StartupView(2, out, clock=Clock())
    view.update(vitals(loading(0), loading(2)))
    view.ready()
    view.close()
    view.update(vitals("joining epoch 2", "joining epoch 2"))
    view.gathering(2)
    assert out.getvalue().splitlines()[-1].startswith("lockstep: loading weights: 200.0 MiB of 200.0 MiB (100 %)")
    assert len(out.getvalue().splitlines()) == 1


def test_a_start_that_fails_leaves_whole_lines() -> None:
    out = Terminal()
    view = StartupView(2, out, clock=Clock())
    view.update(vitals("importing libraries", "importing libraries"))
    view.close()
    assert out.getvalue().endswith("0 of 2 done, 0.0 s\n")
