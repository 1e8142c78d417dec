"""The controller's side of a cluster: gathers keepers, forms epochs, and forms another one when ranks or relays fail.

    cluster = Cluster(Acceptor(listener, ...), layout, rules, memory, limits)
    cluster.gather()                              # until the keepers of all ranks have come, and agree
    channel = cluster.form_first(sizes_of)        # for the engine
    channel = cluster.recover()                   # after RankFailure: the ranks again, survivors with their weights

One thread drives it: nothing happens while nobody waits on it or on its channel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from parallel.layout import Layout
from runtime.channel import RankFailure
from runtime.cluster.acceptor import Acceptor, Arrival
from runtime.cluster.bystanders import await_bystanders
from runtime.cluster.cluster_channel import ClusterChannel
from runtime.cluster.cluster_rules import ClusterLimits, LaunchRefused, LaunchRules
from runtime.cluster.cluster_watch import ClusterWatch
from runtime.cluster.keeper_lines import KeeperLines
from runtime.cluster.keeper_messages import (
    Abort,
    End,
    FromKeeper,
    GaveUp,
    Hello,
    JoinFailed,
    RankEnded,
    RestartRelay,
    Standing,
)
from runtime.cluster.line import FrameLine, LineError
from runtime.cluster.membership import Membership
from runtime.cluster.rank_handle import RankHandle
from runtime.cluster.relay_hub import RelayHub
from runtime.cluster.relay_messages import EpochMemory, RelayHello
from runtime.load_progress import StartupWatcher, Unwatched
from runtime.rank_channel import RankChannel
from runtime.rank_watch import rank_names
from runtime.recovery import CannotRecover
from runtime.sizing import Sizes

EXIT_OK, EXIT_PEER_LOST, EXIT_ENGINE, EXIT_CONFIG = 0, 69, 70, 78  # those that keepers are told: launch/exit_codes.py
RELAY_S = 10.0  # how long a relay may take to come, before another one is started
OPEN_S = 5.0  # how long relays may take to make the memory of an epoch
CLOSE_S = 3.0  # how long keepers may take to end
POLL_S = 0.05
RETRY_S = 0.2  # between two attempts to form an epoch

SizesOf = Callable[[Sequence[Mapping[str, int]]], Sizes]


class Cluster:
    """Every rank, relay and keeper of a deployment, and the epochs they form."""

    def __init__(
        self, acceptor: Acceptor, layout: Layout, rules: LaunchRules,
        memory: Callable[[int, Sequence[int]], EpochMemory], limits: ClusterLimits,
        watcher: StartupWatcher | None = None,
    ) -> None:
        """`memory(epoch, node of each rank)`: what relays allocate for an epoch. `watcher`: of the first epoch."""
        self._watcher = watcher or Unwatched()
        self._acceptor, self._layout, self._rules, self._memory = acceptor, layout, rules, memory
        self._limits = limits
        self._membership = Membership(layout.ep)
        self._keepers = KeeperLines(limits.stall_s)
        self._hub = RelayHub(stall_s=limits.stall_s)
        self._relay_pids: dict[int, int] = {}  # by node
        self._epoch = 0
        self._trouble = ""  # what keeps this epoch from being formed
        self._watch: ClusterWatch | None = None
        self._sizes: Sizes | None = None
        self._is_closed = False
        self.farewell = End(code=EXIT_OK, text="")  # what workers are, or were, told in the end

    @property
    def address(self) -> tuple[str, int]:
        return self._acceptor.address

    @property
    def epoch(self) -> int:
        """The last epoch that was formed, 0 before the first."""
        return self._epoch

    @property
    def sizes(self) -> Sizes | None:
        """What every rank allocates, once the first epoch was formed."""
        return self._sizes

    def gather(self) -> None:
        """Wait for all keepers. LaunchRefused: they are no launch, or not all in time; RankFailure: one has left."""
        begin = time.monotonic()
        first: float | None = None
        try:
            while not all(self._membership.is_here(rank) for rank in range(self._layout.ep)):
                self.poll(POLL_S)
                self._watcher.gathering(sum(map(self._membership.is_here, range(self._layout.ep))))
                now = time.monotonic()
                if first is None and self._membership.hellos():
                    first = now
                if first is not None and now - first > self._limits.join_s:
                    raise LaunchRefused(self._absent(f"within {self._limits.join_s:g} s of the first"))
                gather_s = self._limits.gather_s
                if first is None and gather_s is not None and now - begin > gather_s:
                    raise LaunchRefused(self._absent(f"within {gather_s:g} s"))
            self._rules.compare(self._membership.hellos())
        except ValueError as error:
            self.close(EXIT_CONFIG, str(error))
            raise
        except RankFailure as failure:
            self._dismiss_late_comers(End(code=EXIT_PEER_LOST, text=str(failure)), self._layout.ep)
            self.close(EXIT_PEER_LOST, str(failure))
            raise

    def form_first(self, sizes_of: SizesOf) -> RankChannel:
        """The first epoch. `sizes_of` makes of the ranks' facts what each allocates.

        Raises ValueError for the user's mistakes, RankFailure for the rest; everything is over then.
        """

        def remember(facts: Sequence[Mapping[str, int]]) -> Sizes:
            self._sizes = sizes_of(facts)
            return self._sizes

        try:
            return self._form(remember, self._limits.start_s)
        except ValueError as error:
            self.close(EXIT_CONFIG, str(error))
            raise
        except BaseException as error:
            self.close(EXIT_ENGINE, str(error))
            raise

    def recover(self) -> RankChannel:
        """Another epoch of the same sizes, once the channel of the last one has raised RankFailure.

        Raises CannotRecover when not all ranks are there within `reform_s`; RankFailure when one fails again,
        ValueError for a mistake of the user's that a rank finds.
        """
        self._call_off()
        return self._form_in_time(self._same_sizes, self._limits.reform_s)

    def interrupt(self, code: int, text: str) -> None:
        """Whatever `close` is called with, this is what workers are told."""
        self.farewell = End(code=code, text=text)

    def close(self, code: int = EXIT_OK, text: str = "") -> None:
        """End every rank, relay and keeper; they exit with `code` and say `text`. May be called twice; never raises."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.farewell.code == EXIT_OK:
            self.farewell = End(code=code, text=text)
        for arrival in self._acceptor.take():  # somebody who has just come wants to know, too
            if isinstance(arrival.hello, Hello):
                self._keepers.dismiss(arrival.line, self.farewell)
        self._keepers.end_all(self.farewell, CLOSE_S)
        self._hub.close()
        self._acceptor.close()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in what keepers and relays say, waiting for it up to `timeout_s`."""
        self._keepers.wait([self._acceptor.fileno(), *self._hub.filenos()], timeout_s)
        self._hub.poll()
        for arrival in self._acceptor.take():
            self._welcome(arrival)
        self._hear_keepers()
        for rank, why in self._keepers.take_lost():
            self._lose(rank, why)

    def _end(self, failure: str | None) -> None:
        self.close(EXIT_OK if failure is None else EXIT_PEER_LOST, failure or "")

    # Forming an epoch and calling it off

    def _form_in_time(self, sizes_of: SizesOf, timeout_s: float) -> RankChannel:
        begin = time.monotonic()
        while True:
            try:
                return self._form(sizes_of, timeout_s - (time.monotonic() - begin))
            except LineError:  # a relay that is not up, or stands still: it is replaced
                self._call_off()
                self._wait(RETRY_S)

    def _form(self, sizes_of: SizesOf, timeout_s: float) -> RankChannel:
        self._wait_for_all(timeout_s)
        self._epoch += 1
        self._trouble = ""
        nodes = self._membership.nodes()
        ports = self._hub.open_epoch(self._memory(self._epoch, nodes))
        self._hub.wait_open(OPEN_S)
        handles = [RankHandle(rank, self._membership, self._poll_now) for rank in range(self._layout.ep)]
        self._watch = ClusterWatch(
            rank_names(self._layout), handles, ports.vitals, self._limits.patience, self._what_is_wrong
        )
        for rank, join in enumerate(self._membership.enter(self._epoch)):
            self._keepers.tell(rank, join)
        channel = ClusterChannel(
            self._layout, ports, self._watch, step_timeout_s=self._limits.patience.step_s, on_end=self._end
        )
        try:
            channel.start(sizes_of(channel.wait_ready(self._watcher)))
        except BaseException:
            channel.let_go()
            raise
        return channel

    def _wait_for_all(self, timeout_s: float) -> None:
        """Until every rank has a free process and every node a relay."""
        begin = asked = time.monotonic()
        while missing := self._missing():
            now = time.monotonic()
            if now - begin >= timeout_s:
                raise CannotRecover(f"not all ranks are there after {now - begin:.0f} s: {missing}")
            if now - asked >= RELAY_S:  # one that is started may stand still before it is here
                asked = now
                for node in self._late_relays():
                    self._replace_relay(node)
            self.poll(POLL_S)
            fault = self._hub.fault()
            if fault is not None:  # one that was there before has ended meanwhile
                self._replace_relay(fault.node_rank)

    def _missing(self) -> str:
        away = [rank for rank in range(self._layout.ep) if not self._membership.is_here(rank)]
        missing = self._membership.missing()
        if missing:
            return self._membership.describe(missing)
        if away:
            return self._membership.describe(away)
        nodes = self._late_relays()
        return f"the relays of nodes {nodes} have not come" if nodes else ""

    def _late_relays(self) -> list[int]:
        return sorted({hello.node_rank for hello in self._membership.hellos()} - set(self._hub.nodes))

    def _call_off(self) -> None:
        """End the epoch everywhere, and have replaced what cannot go on."""
        self._membership.end_epoch(self._epoch)
        while (fault := self._hub.fault()) is not None:
            self._replace_relay(fault.node_rank)
        stuck = self._watch.stuck if self._watch is not None else []
        for rank in range(self._layout.ep):
            self._keepers.tell(rank, Abort(epoch=self._epoch, leave_s=0.0 if rank in stuck else self._limits.stall_s))
        self._watch = None

    def _replace_relay(self, node: int) -> None:
        self._hub.detach(node)
        rank, pid = self._membership.keeper_of_relay(node), self._relay_pids.pop(node, 0)
        if rank is not None:
            self._keepers.tell(rank, RestartRelay(pid=pid))

    def _same_sizes(self, facts: Sequence[Mapping[str, int]]) -> Sizes:
        """Survivors and replacements must hold what the first epoch's ranks held."""
        assert self._sizes is not None, "the first epoch was not formed"
        for rank, fact in enumerate(facts):
            if fact["num_pages"] < self._sizes.num_pages:
                raise CannotRecover(
                    f"rank {rank} holds {fact['num_pages']} KV pages, but the deployment has {self._sizes.num_pages}"
                )
        return self._sizes

    def _what_is_wrong(self) -> str:
        fault = self._hub.fault()
        return fault.text if fault is not None else self._hub.gone() or self._trouble

    # What keepers and relays say

    def _poll_now(self) -> None:
        """For handles, which are many and ask often."""
        if self._keepers.is_due():
            self.poll()

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.poll(left)

    def _welcome(self, arrival: Arrival) -> None:
        hello = arrival.hello
        if isinstance(hello, RelayHello):
            self._hub.attach(hello.node_rank, arrival.line)
            self._relay_pids[hello.node_rank] = hello.pid
            return
        hello = self._rules.arrived(hello)
        try:
            self._admit(hello)
        except ValueError as error:
            farewell = End(code=EXIT_CONFIG, text=str(error))
            if self._epoch:
                self._keepers.dismiss(arrival.line, farewell)
                return
            self._dismiss_late_comers(farewell, hello.world_size, arrival.line)
            raise LaunchRefused(str(error)) from None
        self._keepers.add(hello.rank, arrival.line)
        for message in self._keepers.decoded(hello.rank, arrival.frames):
            self._take(hello.rank, message)

    def _dismiss_late_comers(self, farewell: End, world_size: int, *lines: FrameLine) -> None:
        """They would go on looking for the controller. `lines`: of those who have come, told at the same moment."""
        num_here = len(self._membership.hellos()) + len(lines)
        for line in (*lines, *await_bystanders(self._acceptor, world_size, num_here)):
            self._keepers.dismiss(line, farewell)

    def _admit(self, hello: Hello) -> None:
        """A new keeper. Raises ValueError when it is none of this launch, or not needed."""
        if not self._keepers.is_quiet(hello.rank) and self._epoch:
            for _ in range(2):  # the one before may have ended since: what it said last, then its end
                self._hear_keepers()
        if not self._keepers.is_quiet(hello.rank) and self._epoch:
            self._rules.check_some([*self._membership.hellos(), hello])  # names both
        if self._membership.is_here(hello.rank) and self._epoch:
            self._keepers.drop(hello.rank)
            self._lose(hello.rank, "another one has come in its place")
        others = [other for other in self._membership.hellos() if self._membership.is_here(other.rank)]
        self._rules.check_some([*others, hello])
        if self._epoch:
            self._rules.compare([*others, hello])
        self._membership.hello(hello)

    def _hear_keepers(self) -> None:
        for rank, message in self._keepers.receive():
            self._take(rank, message)

    def _take(self, rank: int, message: FromKeeper) -> None:
        if isinstance(message, Standing):
            self._membership.standing(rank, message)
        elif isinstance(message, RankEnded):
            self._membership.ended(rank, message)
        elif isinstance(message, JoinFailed):
            if message.epoch == self._epoch:
                self._trouble = f"rank {rank} cannot join: {message.text}"
        elif isinstance(message, GaveUp):
            self._keepers.drop(rank)
            self._lose(rank, message.text or f"ended with code {message.code}")

    def _lose(self, rank: int, why: str) -> None:
        self._membership.keeper_gone(rank, why)
        if self._epoch == 0 and not self._is_closed:
            raise RankFailure(f"rank {rank} has left before the start: {why}")

    def _absent(self, when: str) -> str:
        absent = [rank for rank in range(self._layout.ep) if not self._membership.is_here(rank)]
        refused = "".join(f"; refused: {text}" for text in self._acceptor.refusals)
        num_here = self._layout.ep - len(absent)
        return f"{num_here} of {self._layout.ep} ranks came {when}, not {', '.join(map(str, absent))}{refused}"
