"""Who takes part: what keepers have said of their ranks, as a state machine without sockets, processes or clocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from runtime.cluster.keeper_messages import Hello, Join, RankEnded, Standing


@dataclass(frozen=True, kw_only=True)
class Died:
    """The end of a process, as its keeper has told; or `code` None when the keeper itself is gone."""

    code: int | None
    text: str


@dataclass(kw_only=True)
class _Member:
    """One rank and its keeper. `serial`: the process that is in the epoch, 0: none."""

    hello: Hello
    standing: Standing | None = None
    serial: int = 0
    died: Died | None = None  # of that process
    is_away: str = ""  # why the keeper is gone, "" while it is there


@dataclass
class Membership:
    """All ranks of a deployment. A rank is free when a process of it stands by and has left what is over."""

    num_ranks: int
    over: int = 0  # the last epoch that is over
    _members: dict[int, _Member] = field(default_factory=dict)

    def hello(self, message: Hello) -> None:
        """A keeper has come, the first of its rank or in the place of one that is gone."""
        before = self._members.get(message.rank)
        assert before is None or before.is_away, "the keeper of this rank is there"
        member = _Member(hello=message)
        if before is not None:  # it counts its processes anew
            member.died = before.died
        self._members[message.rank] = member

    def is_here(self, rank: int) -> bool:
        member = self._members.get(rank)
        return member is not None and not member.is_away

    def hellos(self) -> list[Hello]:
        """Of all keepers that have come, in rank order."""
        return [self._members[rank].hello for rank in sorted(self._members)]

    def keeper_gone(self, rank: int, why: str) -> None:
        """Its rank goes with it."""
        member = self._members[rank]
        member.is_away, member.standing = why, None
        if member.died is None:
            member.died = Died(code=None, text=f"its keeper on {member.hello.host} is gone: {why}")

    def standing(self, rank: int, message: Standing) -> None:
        self._members[rank].standing = message

    def ended(self, rank: int, message: RankEnded) -> None:
        member = self._members[rank]
        if member.standing is not None and member.standing.serial == message.serial:
            member.standing = None
        if member.serial == message.serial and member.died is None:
            member.died = Died(code=message.code, text=message.text)

    def died(self, rank: int) -> Died | None:
        """How the process ended that is in the epoch; None while it lives."""
        return self._members[rank].died

    def end_epoch(self, epoch: int) -> None:
        """Nobody is free before it has left this epoch."""
        self.over = max(self.over, epoch)

    def missing(self) -> list[int]:
        """Ranks that no free process stands for."""
        return [rank for rank in range(self.num_ranks) if not self._is_free(rank)]

    def describe(self, ranks: Iterable[int]) -> str:
        """Why each of them is missing, in one line."""
        return "; ".join(f"rank {rank}: {self._why(rank)}" for rank in ranks)

    def nodes(self) -> list[int]:
        """The node of each rank, in rank order; all must have come."""
        return [self._members[rank].hello.node_rank for rank in range(self.num_ranks)]

    def keeper_of_relay(self, node: int) -> int | None:
        """The rank whose keeper starts the relay of a node."""
        ranks = (m.hello.rank for m in self._members.values() if m.hello.node_rank == node and not m.hello.local_rank)
        return next(ranks, None)

    def enter(self, epoch: int) -> Sequence[Join]:
        """Have the free processes of all ranks enter an epoch: what to tell each keeper, in rank order."""
        assert epoch > self.over, (epoch, self.over)
        assert not self.missing(), self.missing()
        free = [member.standing for _, member in sorted(self._members.items()) if member.standing is not None]
        assert len(free) == self.num_ranks
        for rank, standing in enumerate(free):
            member = self._members[rank]
            member.serial, member.died, member.standing = standing.serial, None, None
        hosts, ports = [s.host for s in free], [s.port for s in free]
        return [
            Join(epoch=epoch, serial=standing.serial, hosts=hosts, ports=ports, nodes=self.nodes())
            for standing in free
        ]

    def _is_free(self, rank: int) -> bool:
        member = self._members.get(rank)
        return member is not None and member.standing is not None and member.standing.left >= self._owed(member)

    def _owed(self, member: _Member) -> int:
        """The epoch that a process of this rank must have left. One that was in none owes nothing."""
        assert member.standing is not None
        return self.over if member.standing.serial == member.serial else 0

    def _why(self, rank: int) -> str:
        member = self._members.get(rank)
        if member is None:
            return "has not come"
        if member.is_away:
            return f"its keeper on {member.hello.host} is gone ({member.is_away}) and no other has come"
        if member.standing is not None or member.died is None:
            return f"has not left epoch {self.over}" if member.serial else "is starting"
        return "is being replaced"
