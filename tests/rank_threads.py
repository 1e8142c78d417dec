"""All ranks of a deployment as threads of this process, behind the engine's channel: real shards, no processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from parallel.group import Group
from parallel.layout import RankGroups, with_ledger
from parallel.ledger import Ledger
from runtime.config import EngineConfig
from runtime.engine import Deployment, Engine
from runtime.loading import LoadedModel, load_model, read_facts
from runtime.placement_messages import PlacementReply, PlacementRequest
from runtime.plan import StepPlan, StepResult, decode_section, encode_step
from runtime.rank import Rank
from runtime.rank_messages import decode_control, encode_control
from runtime.sizing import choose_sizes
from tests.thread_group import run_ranks

TIMEOUT_S = 120.0
Wrap = Callable[[int, Group], Group]
Adapt = Callable[[int, LoadedModel], LoadedModel]


class ThreadChannel:
    """Sends each step, as bytes, to every rank's thread, and checks that the ranks of an attention group agree."""

    def __init__(self, config: EngineConfig, wrap: Wrap | None = None, adapt: Adapt | None = None) -> None:
        self._layout = config.layout
        self._inboxes: list[queue.SimpleQueue[bytes | PlacementRequest | None]] = [
            queue.SimpleQueue() for _ in range(config.layout.ep)
        ]
        self._replies: queue.SimpleQueue[tuple[int, PlacementReply]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[int, StepResult | BaseException]] = queue.SimpleQueue()
        self._early: list[tuple[int, StepResult]] = []
        self.ledgers = [Ledger() for _ in range(config.layout.ep)]
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(config, wrap, adapt))
        self._thread.start()

    def send(self, plans: Sequence[StepPlan]) -> None:
        data = encode_step(plans)
        for inbox in self._inboxes:
            inbox.put(data)

    def receive(self) -> list[StepResult]:
        found: dict[int, StepResult] = {}
        while len(found) < self._layout.ep:
            rank, result = self._next(found)
            found[rank] = result
        leaders = []
        for group in range(self._layout.dp):
            first, *others = (found[group * self._layout.tp + t] for t in range(self._layout.tp))
            for other in others:
                for name in ("counts", "token_ids", "bad"):
                    assert (getattr(first, name) == getattr(other, name)).all(), f"ranks disagree about {name}"
            leaders.append(first)
        return leaders

    def request(self, message: PlacementRequest) -> None:
        data = encode_control(message)
        for inbox in self._inboxes:
            decoded = decode_control(data)
            assert isinstance(decoded, PlacementRequest)
            inbox.put(decoded)

    def replies(self) -> list[tuple[int, PlacementReply]]:
        self.raise_failure()
        found = []
        while not self._replies.empty():
            found.append(self._replies.get())
        return found

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        self._thread.join()

    def kill(self) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _next(self, found: dict[int, StepResult]) -> tuple[int, StepResult]:
        for i, (rank, _) in enumerate(self._early):
            if rank not in found:
                return self._early.pop(i)
        while True:
            try:
                rank, result = self._outbox.get(timeout=TIMEOUT_S)
            except queue.Empty:
                raise RuntimeError(f"ranks hang: only {sorted(found)} of {self._layout.ep} answered") from None
            if isinstance(result, BaseException):
                self.failure = result
                raise result
            if rank not in found:
                return rank, result
            self._early.append((rank, result))

    def _next_message(self, rank: int, own: Rank) -> bytes | PlacementRequest | None:
        """The next one; while experts are being read it is told when they are there."""
        while own.experts is not None and own.experts.is_staging:
            try:
                return self._inboxes[rank].get(timeout=0.01)
            except queue.Empty:
                self._reply(rank, own)
        return self._inboxes[rank].get()

    def _reply(self, rank: int, own: Rank, request: PlacementRequest | None = None) -> None:
        if own.experts is None:
            return
        for reply in own.experts.take(request) if request is not None else own.experts.poll():
            decoded = decode_control(encode_control(reply))
            assert isinstance(decoded, PlacementReply)
            self._replies.put((rank, decoded))

    def _run(self, config: EngineConfig, wrap: Wrap | None, adapt: Adapt | None) -> None:
        def work(rank: int, groups: RankGroups) -> None:
            ledger = self.ledgers[rank]
            tp, ep = (wrap(rank, g) if wrap else g for g in (groups.tp, groups.ep))
            groups = with_ledger(RankGroups(tp=tp, ep=ep), ledger)
            loaded = load_model(config, groups)
            if adapt is not None:
                loaded = adapt(rank, loaded)
            own = Rank(config, loaded, groups, _ignore)
            own.allocate(choose_sizes(config, loaded.facts))
            while (data := self._next_message(rank, own)) is not None:
                if isinstance(data, bytes):
                    plan = decode_section(data, config.layout.dp_rank(rank))
                    own.run(plan, lambda result: self._outbox.put((rank, result)))
                    self._reply(rank, own)
                else:
                    self._reply(rank, own, data)

        torch.set_num_threads(1)
        try:
            run_ranks(config.layout, work)
        except BaseException as error:  # noqa: BLE001  (whatever it was, the test shall see it)
            self._outbox.put((-1, error))


def _ignore(_phase: str) -> None:
    pass


def engine_over_threads(
    config: EngineConfig, wrap: Wrap | None = None, adapt: Adapt | None = None
) -> tuple[Engine, ThreadChannel]:
    """An engine over rank threads; closing it ends them. `wrap` may replace a rank's groups, `adapt` its model."""
    channel = ThreadChannel(config, wrap, adapt)
    facts = read_facts(config)
    deployment = Deployment(facts=facts, sizes=choose_sizes(config, facts), channel=channel, bytes_read=())
    return Engine(config, deployment=deployment), channel
