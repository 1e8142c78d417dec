"""Collectives over several hosts: the definitions, random traffic against threads, large messages, and every misuse."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from parallel.abort import Aborted
from parallel.exchange_errors import OutOfStep, PeerLost
from parallel.group import Group, Pending, PendingRows
from parallel.layout import Layout, RankGroups
from parallel.linked_group import LinkedGroup
from parallel.shm_group import ShmGroup
from parallel.socket_group import close_groups
from tests.parallel.hosts import hosts
from tests.parallel.test_group import Outputs, check, exercise
from tests.thread_group import run_ranks

SHAPES = [
    (Layout(tp=2), (0, 1)),
    (Layout(dp=3), (0, 1, 2)),
    (Layout(dp=2, tp=2), (0, 0, 1, 1)),
    (Layout(dp=2, tp=2), (0, 1, 0, 1)),
    (Layout(dp=2, tp=2), (0, 0, 0, 1)),
    (Layout(dp=4), (0, 1, 2, 3)),
    (Layout(tp=2), (5, 5)),
]


@pytest.mark.parametrize(("layout", "nodes"), SHAPES)
def test_definitions(layout: Layout, nodes: tuple[int, ...]) -> None:
    with hosts(layout, nodes) as made:
        results = made.run(lambda _, groups: (exercise(groups.tp), exercise(groups.ep)))
    check([ep for _, ep in results])
    for d in range(layout.dp):
        check([results[d * layout.tp + t][0] for t in range(layout.tp)])


def test_ranks_of_one_host_use_nothing_but_its_memory() -> None:
    with hosts(Layout(dp=2, tp=2), (0, 0, 1, 1)) as made:
        kinds = made.run(lambda _, groups: (type(groups.tp), type(groups.ep)))
    assert kinds == [(ShmGroup, LinkedGroup)] * 4


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.bfloat16])
def test_types(dtype: torch.dtype) -> None:
    def work(rank: int, groups: RankGroups) -> Tensor:
        return groups.ep.all_gather(torch.tensor([[rank, 1]]).to(dtype)).wait()

    with hosts(Layout(dp=3), (0, 1, 1)) as made:
        for found in made.run(work):
            assert found.tolist() == torch.tensor([[rank, 1] for rank in range(3)]).to(dtype).tolist()
            assert found.dtype == dtype


@pytest.mark.parametrize("nodes", [(0, 1, 2, 3), (0, 1, 1, 0), (0, 0, 0, 0)])
def test_sums_are_added_in_rank_order_on_any_hosts(nodes: tuple[int, ...]) -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    expected = torch.zeros(1)
    for value in values:
        expected += torch.tensor([value])

    def work(rank: int, groups: RankGroups) -> Tensor:
        return groups.ep.reduce_scatter(torch.full((4,), values[rank])).wait()

    with hosts(Layout(dp=4), nodes) as made:
        assert [found.tolist() for found in made.run(work)] == [expected.tolist()] * 4


@dataclass
class Rows:
    """Rows whose numbers come with them, which are those of the script."""

    exchange: PendingRows
    expected: list[int]

    def wait(self) -> Tensor:
        rows, counts = self.exchange.wait()
        assert counts == self.expected
        return rows


def traffic(group: Group, seed: int, calls: int) -> list[Outputs]:
    """Random operations, several under way, waited for in any order; what they gave, in the order of the calls."""
    script, pace = random.Random(seed), random.Random(1000 * seed + group.rank)
    size, found = group.size, {}
    begun: list[tuple[int, Pending]] = []
    for call in range(calls):
        rows, width = script.choice((0, 1, 1, 7, 40)), script.choice((1, 3, 64))
        counts = [[script.choice((0, 0, 1, 5, 30)) for _ in range(size)] for _ in range(size)]
        kind, depth = script.randrange(5), script.randrange(6)
        values = torch.Generator().manual_seed(997 * call + group.rank)
        send, receive = counts[group.rank], [counts[i][group.rank] for i in range(size)]
        n = sum(send) if kind >= 3 else rows if kind == 0 else rows * size
        x = torch.randn(n, width, generator=values)
        pending = (
            group.all_gather(x) if kind == 0 else group.reduce_scatter(x) if kind == 1
            else group.all_to_all(x) if kind == 2
            else group.all_to_all_uneven(x, send, receive) if kind == 3
            else Rows(group.all_to_all_sized(x, send, script.choice((30, 31, 200))), receive)
        )
        if pace.random() < 0.02:
            time.sleep(0.002)
        begun.append((call, pending))
        while len(begun) > depth:
            earlier, operation = begun.pop(pace.randrange(len(begun)))
            found[earlier] = operation.wait().clone()
        if begun and begun[0][0] < call - 5:  # shared memory has room for eight
            earlier, operation = begun.pop(0)
            found[earlier] = operation.wait().clone()
    for earlier, operation in begun:
        found[earlier] = operation.wait().clone()
    return [{"x": found[call]} for call in range(calls)]


@pytest.mark.parametrize(("nodes", "seed"), [((0, 1, 2), 1), ((0, 0, 1), 2), ((0, 1, 0), 3), ((0, 0, 0), 4)])
def test_random_traffic_as_over_threads(nodes: tuple[int, ...], seed: int) -> None:
    layout, calls = Layout(dp=3), 200
    expected = run_ranks(layout, lambda _, groups: traffic(groups.ep, seed, calls))
    with hosts(layout, nodes) as made:
        found = made.run(lambda _, groups: traffic(groups.ep, seed, calls))
    for rank in range(3):
        for call in range(calls):
            assert torch.equal(found[rank][call]["x"], expected[rank][call]["x"]), (rank, call)


def test_messages_that_no_kernel_buffer_holds() -> None:
    """Both ranks give 24 MB four times before either waits: only what moves in the background can end it."""
    rows = 3 << 20

    def work(rank: int, groups: RankGroups) -> bool:
        begun = [groups.ep.all_to_all(torch.full((2 * rows,), 10 * rank + i)) for i in range(4)]
        good = True
        for i in (3, 1, 0, 2):
            got = begun[i].wait()
            good &= bool((got[:rows] == i).all()) and bool((got[rows:] == 10 + i).all())
        return good

    with hosts(Layout(dp=2), (0, 1)) as made:
        assert made.run(work) == [True, True]


def test_what_a_rank_gave_last_leaves_although_it_closes() -> None:
    """Rank 0 has all that it needs and ends, as at a stop; 32 MB of it are still on the way."""
    rows = 8 << 20

    def work(rank: int, groups: RankGroups) -> float:
        if rank == 0:
            groups.ep.all_to_all_uneven(torch.ones(rows), (0, rows), (0, 0)).wait()
            return 0.0
        time.sleep(0.2)
        return float(groups.ep.all_to_all_uneven(torch.ones(0), (0, 0), (rows, 0)).wait().sum())

    with hosts(Layout(dp=2), (0, 1)) as made:
        assert made.run(work)[1] == rows


def test_large_messages_of_unknown_size() -> None:
    def work(rank: int, groups: RankGroups) -> list[list[int]]:
        found = []
        for rows in (3 << 20, 5, 2 << 20, 0):
            begun = [groups.ep.all_to_all_sized(torch.full((rows + 1,), i), (rows, 1), 4 << 20) for i in range(3)]
            for i, pending in enumerate(begun):
                given, counts = pending.wait()
                assert bool((given == i).all())
                found.append(counts)
        return found

    with hosts(Layout(dp=2), (0, 1)) as made:
        found = made.run(work)
    assert found[0] == [[rows, rows] for rows in (3 << 20, 5, 2 << 20, 0) for _ in range(3)]
    assert found[1] == [[1, 1]] * 12


def test_large_messages_arrive_while_the_receiver_computes() -> None:
    """After the compute nothing is left to come, although the kernel cannot hold it."""
    rows = 4 << 20
    sent, arrived = threading.Event(), [False]

    def work(rank: int, groups: RankGroups) -> None:
        group = groups.ep
        assert isinstance(group, LinkedGroup)
        x = torch.ones(rows if rank == 0 else 0)
        pending = group.all_to_all_uneven(x, (0, len(x)), (0, 0) if rank == 0 else (rows, 0))
        if rank == 1:
            link = group._links[0]
            deadline = time.monotonic() + 20
            while link._awaited and time.monotonic() < deadline:  # computing
                time.sleep(0.01)
            arrived[0] = not link._awaited
            sent.set()
        else:
            sent.wait(20)
        assert float(pending.wait().sum()) == (rows if rank else 0)

    with hosts(Layout(dp=2), (0, 1)) as made:
        made.run(work)
    assert arrived == [True]


def test_what_is_given_has_left_before_anybody_waits() -> None:
    """The overlap of two halves relies on it: no rank has to be in `wait` for another's message to travel."""
    given, taken = threading.Event(), threading.Event()

    def work(rank: int, groups: RankGroups) -> float:
        if rank == 0:
            pending = groups.ep.all_gather(torch.ones(1000))
            given.set()
            assert taken.wait(20)  # rank 1 has got it, and this rank has not begun to wait
            return float(pending.wait().sum())
        assert given.wait(20)
        total = groups.ep.all_gather(torch.ones(1000)).wait().sum()
        taken.set()
        return float(total)

    with hosts(Layout(dp=2), (0, 1)) as made:
        assert made.run(work) == [2000.0, 2000.0]


@pytest.mark.parametrize(("nodes", "blocked"), [((0, 1), LinkedGroup), ((0, 0), ShmGroup), ((0, 0, 1), LinkedGroup)])
def test_a_wait_is_called_off(nodes: tuple[int, ...], blocked: type) -> None:
    with hosts(Layout(dp=len(nodes)), nodes) as made:
        def work(rank: int, groups: RankGroups) -> float | None:
            assert isinstance(groups.ep, blocked)
            if rank == 1:  # stays away
                time.sleep(0.2)
                made.aborts[0].set()
                done.wait(10)
                return None
            if rank == 2:
                done.wait(10)
                return None
            begin = time.monotonic()
            with pytest.raises(Aborted):
                groups.ep.all_gather(torch.zeros(1)).wait()
            done.set()
            return time.monotonic() - begin

        done = threading.Event()
        took = made.run(work)[0]
        assert took is not None
        assert 0.15 < took < 5  # at the signal, not at a time-out


def test_a_lost_rank_is_named() -> None:
    def work(rank: int, groups: RankGroups) -> str:
        x = torch.ones(2)
        assert float(groups.ep.all_gather(x).wait().sum()) == 6.0
        if rank == 1:
            close_groups(groups)
            return ""
        with pytest.raises(PeerLost) as error:
            groups.ep.all_gather(x).wait()
        return str(error.value)

    with hosts(Layout(dp=3), (0, 1, 2)) as made:
        found = made.run(work)
    assert "ep: rank 1 is lost" in found[0]


def test_what_a_lost_rank_gave_before_still_counts() -> None:
    gone = threading.Event()

    def work(rank: int, groups: RankGroups) -> float:
        if rank == 1:
            groups.ep.all_gather(torch.ones(1000))
            groups.ep._links[0]._sock.shutdown(1)  # type: ignore[attr-defined]
            gone.set()
            time.sleep(0.2)
            return 0.0
        assert gone.wait(10)
        return float(groups.ep.all_gather(torch.ones(1000)).wait().sum())

    with hosts(Layout(dp=2), (0, 1)) as made:
        assert made.run(work)[0] == 2000.0


def test_ranks_out_of_step_are_named() -> None:
    def work(rank: int, groups: RankGroups) -> str:
        x = torch.zeros(2, 1)
        groups.ep.all_gather(x).wait()
        with pytest.raises(OutOfStep) as error:
            (groups.ep.all_to_all(x) if rank else groups.ep.reduce_scatter(x)).wait()
        return str(error.value)

    with hosts(Layout(dp=2), (0, 1)) as made:
        found = made.run(work)
    assert "ep: rank 1 made call 1, all_to_all, with 4 bytes; rank 0 call 1, reduce_scatter, with 4" in found[0]
    assert "ep: rank 0 made call 1, reduce_scatter" in found[1]


def test_ranks_of_one_host_out_of_step_are_named() -> None:
    def work(rank: int, groups: RankGroups) -> str:
        if rank < 2:
            return ""
        x = torch.zeros(4, 1)
        local = groups.ep._local  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError) as error:
            (local.all_to_all(x) if rank == 3 else local.summands(x)).wait()
        return str(error.value)

    with hosts(Layout(dp=4), (0, 0, 1, 1)) as made:
        assert "rank 3 made all_to_all, rank 2 reduce_scatter" in made.run(work)[2]


def test_another_number_of_bytes_is_told() -> None:
    def work(rank: int, groups: RankGroups) -> str:
        with pytest.raises(OutOfStep) as error:
            groups.ep.all_gather(torch.zeros(1 + rank)).wait()
        return str(error.value)

    with hosts(Layout(dp=2), (0, 1)) as made:
        assert "rank 1 made call 0, all_gather, with 8 bytes; rank 0 call 0, all_gather, with 4" in made.run(work)[0]


def test_a_rank_that_waits_uses_no_processor() -> None:
    def work(rank: int, groups: RankGroups) -> float:
        if rank == 1:
            time.sleep(0.7)
        begin = time.thread_time()
        groups.ep.all_gather(torch.zeros(1)).wait()
        return time.thread_time() - begin

    with hosts(Layout(dp=2), (0, 1)) as made:
        assert made.run(work)[0] < 0.05


def test_no_thread_for_small_messages() -> None:
    def work(_rank: int, groups: RankGroups) -> int:
        exercise(groups.ep)
        for _ in range(3):  # with room for megabytes that nobody sends
            groups.ep.all_to_all_sized(torch.zeros(3, 1), (1, 2), 1 << 20).wait()
        return sum(thread.name == "exchange" for thread in threading.enumerate())

    with hosts(Layout(dp=2), (0, 1)) as made:
        assert made.run(work) == [0, 0]
