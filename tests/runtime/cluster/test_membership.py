"""Who is free to join, who has died and who is missed, told message by message."""

from __future__ import annotations

import random

from runtime.cluster.keeper_messages import Hello, RankEnded, Standing
from runtime.cluster.membership import Died, Membership


def hello(rank: int, node: int | None = None) -> Hello:
    return Hello(
        rank=rank, world_size=2, local_rank=0, local_world_size=1, node_rank=rank if node is None else node,
        num_nodes=2, source="manual", host=f"host{rank}", pid=100 + rank, facts={},
    )


def standing(serial: int, left: int = 0) -> Standing:
    return Standing(serial=serial, left=left, host="h", port=1000 + serial)


def two_ranks() -> Membership:
    """Both in epoch 1, with process 1 of each."""
    members = Membership(2)
    for rank in range(2):
        members.hello(hello(rank))
        members.standing(rank, standing(1))
    members.enter(1)
    return members


def test_nobody_is_free_before_it_stands_by() -> None:
    members = Membership(2)
    assert members.missing() == [0, 1]
    assert members.describe([0]) == "rank 0: has not come"
    members.hello(hello(1))
    assert members.is_here(1)
    assert not members.is_here(0)
    assert members.describe([1]) == "rank 1: is starting"
    members.standing(1, standing(1))
    assert members.missing() == [0]


def test_all_enter_with_each_others_addresses() -> None:
    members = Membership(2)
    for rank in (1, 0):
        members.hello(hello(rank))
    members.standing(0, Standing(serial=4, left=0, host="a", port=11))
    members.standing(1, Standing(serial=5, left=0, host="b", port=22))
    first, second = members.enter(1)
    assert (first.serial, second.serial) == (4, 5)
    for join in (first, second):
        assert (join.epoch, join.hosts, join.ports, join.nodes) == (1, ["a", "b"], [11, 22], [0, 1])
    assert members.missing() == [0, 1], "who is in an epoch is not free for another"


def test_a_survivor_is_free_once_it_has_left() -> None:
    members = two_ranks()
    members.end_epoch(1)
    members.standing(0, standing(1, left=0))  # said before it joined: it was on the way
    assert members.missing() == [0, 1]
    assert members.describe([0]) == "rank 0: has not left epoch 1"
    members.standing(0, standing(1, left=1))
    assert members.missing() == [1]


def test_a_spare_owes_nothing() -> None:
    members = two_ranks()
    members.ended(1, RankEnded(serial=1, code=-9, text=""))
    assert members.died(1) == Died(code=-9, text="")
    members.end_epoch(1)
    assert members.describe([1]) == "rank 1: is being replaced"
    members.standing(1, standing(2))
    members.standing(0, standing(1, left=1))
    assert members.missing() == []
    assert [join.serial for join in members.enter(2)] == [1, 2]
    assert members.died(1) is None, "the process that is in the epoch now lives"


def test_the_end_of_a_spare_is_nobodys_death() -> None:
    members = two_ranks()
    members.ended(0, RankEnded(serial=2, code=1, text=""))
    assert members.died(0) is None


def test_a_free_process_that_ends_is_not_free() -> None:
    members = two_ranks()
    members.end_epoch(1)
    members.standing(0, standing(1, left=1))
    members.ended(0, RankEnded(serial=1, code=-11, text=""))
    assert members.missing() == [0, 1]


def test_a_rank_goes_with_its_keeper_and_comes_back_with_another() -> None:
    members = two_ranks()
    members.keeper_gone(1, "line closed")
    died = members.died(1)
    assert died is not None
    assert died.code is None
    assert "its keeper on host1 is gone: line closed" in died.text
    assert not members.is_here(1)
    assert "no other has come" in members.describe([1])
    members.end_epoch(1)
    members.standing(0, standing(1, left=1))
    members.hello(hello(1, node=5))
    assert members.died(1) is died, "the end of the old process stays known until the next epoch"
    members.standing(1, standing(1))  # the new keeper counts its processes anew
    assert members.missing() == []
    assert members.enter(2)[0].nodes == [0, 5]


def test_the_relay_of_a_node_is_the_first_local_ranks() -> None:
    members = two_ranks()
    assert [members.keeper_of_relay(node) for node in (0, 1, 7)] == [0, 1, None]


def test_random_histories_never_let_a_process_enter_that_is_dead_or_elsewhere() -> None:
    """A model beside it: the newest living process of each rank, and whether that has left the last epoch."""
    rng = random.Random(5)
    for _ in range(200):
        members, epoch = Membership(2), 0
        living = [0, 0]  # serial
        inside = [0, 0]  # the epoch that process is in
        serials = [0, 0]
        for rank in range(2):
            members.hello(hello(rank))
        for _ in range(40):
            rank = rng.randrange(2)
            event = rng.choice(["born", "die", "leave", "enter"])
            if event == "born" and not living[rank]:
                serials[rank] += 1
                living[rank], inside[rank] = serials[rank], 0
                members.standing(rank, standing(living[rank]))
            elif event == "die" and living[rank]:
                members.ended(rank, RankEnded(serial=living[rank], code=-9, text=""))
                living[rank] = 0
            elif event == "leave" and living[rank] and inside[rank]:
                members.standing(rank, standing(living[rank], left=inside[rank]))
                inside[rank] = 0
            elif event == "enter":
                members.end_epoch(epoch)
                free = [bool(living[r]) and not inside[r] for r in range(2)]
                assert members.missing() == [r for r in range(2) if not free[r]]
                if all(free):
                    epoch += 1
                    assert [join.serial for join in members.enter(epoch)] == living
                    inside = [epoch, epoch]
