"""The controller's side of expert placement: loads in, a better placement out, all ranks changed between two steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from moe.moves import in_batches, plan_moves
from moe.placement import Placement, imbalance
from runtime.channel import Channel
from runtime.config import EngineConfig
from runtime.models.config import load_model_config
from runtime.placement_messages import (
    AskLoads,
    Loads,
    Place,
    PlacementReply,
    PlacementRequest,
    Staged,
    counts_of,
    move_weights,
    stage,
)
from runtime.placement_round import (
    Counts,
    Fingerprints,
    Rebalanced,
    Round,
    agreed_fingerprints,
    better_placement,
    first_error,
    with_last,
)
from runtime.placing import first_placement

KEPT_LOADS = 0.5  # how much of what was counted before the last round still counts
LEAST_GAIN = 0.05  # of a layer's busiest rank, below which a re-placement nobody asked for leaves the layer alone
MOVE_VALUES = 1 << 22  # float32 values that a rank sends, or gets, in one exchange: as long are steps held up
NOBODY = 0  # rounds count from 1
TURN_S = 0.002  # between two looks while nothing else is to be done


@runtime_checkable
class PlacementChannel(Protocol):
    """A way to ranks whose experts can be placed (runtime/rank_channel.py)."""

    def request(self, message: PlacementRequest) -> None: ...

    def replies(self) -> list[tuple[int, PlacementReply]]: ...

    def raise_failure(self) -> None: ...

    def kill(self) -> None: ...


class ExpertBalancer:
    """One round at a time: ask for loads, plan beside the steps, stage, change over. `turn` never waits."""

    def __init__(self, config: EngineConfig, channel: object, ranks_per_node: int) -> None:
        """Raises ValueError or FileNotFoundError for a placement that does not fit the model or the layout."""
        self._config, self._model = config, load_model_config(config.model)
        self._per_node = ranks_per_node
        placement = first_placement(config, self._model)
        assert placement is not None, "experts have fixed places"
        self.placement = placement
        self.last: Rebalanced | None = None
        self.on_round: Callable[[Rebalanced], None] | None = None  # told when one is over
        self.is_resting = False  # somebody measures: steps do not count, and no round begins by itself
        self._loads: Counts = np.zeros((len(placement.layers), placement.num_experts))
        self._fingerprints: Fingerprints | None = None  # [num_layers, num_experts]
        self._round: Round | None = None
        self._round_id = 0
        self._steps = 0
        # Files may differ between hosts: the controller's counts.
        self._ranks_may_differ = config.placement_file is not None
        if self._ranks_may_differ:
            self.restore(channel)

    @property
    def loads(self) -> Counts:
        """[num_layers, num_experts] routes counted up to the last round, older ones for less."""
        return self._loads

    def turn(self, channel: object) -> None:
        """Once a step: take in what ranks have said, do the next thing, begin a round when one is due."""
        if self.is_resting:
            return
        self._steps += 1
        every = self._config.rebalance_steps
        if self._round is None and every and self._steps >= every:
            self._begin(_placing(channel), LEAST_GAIN)
        if self._round is not None:
            self._advance(_placing(channel))

    def rebalance(self, channel: object, *, wait: bool) -> Rebalanced | None:
        """Begin a round, or join the one under way. With `wait` come back when it is over.

        Raises ValueError, with `wait`, where it failed: then nothing has changed.
        """
        placing = _placing(channel)
        if self._round is None:
            self._begin(placing, 0.0)
        if not wait:
            return None
        while self._round is not None:
            if not self._advance(placing):
                time.sleep(TURN_S)
        assert self.last is not None
        if self.last.error:
            raise ValueError(f"experts stay where they are: {self.last.error}")
        return self.last

    def forget_loads(self, channel: object) -> None:
        """What was counted so far says nothing of the load to come: it was somebody's measurement."""
        self._loads[:] = 0.0
        _placing(channel).request(AskLoads(round_id=NOBODY))  # ranks count from here on; nobody hears the answer

    def restore(self, channel: object) -> None:
        """Have ranks that may hold anything take the placement in force; waits, no step may be sent before.

        Raises ValueError when a rank cannot.
        """
        self._round = None
        if not self._ranks_may_differ:
            return
        placing = _placing(channel)
        placing.replies()
        self._round_id += 1
        placing.request(stage(self._round_id, self.placement, "files", self._fingerprints, self._per_node))
        staged: dict[int, Staged] = {}
        while len(staged) < self.placement.num_ranks:
            for rank, reply in placing.replies():
                if isinstance(reply, Staged) and reply.round_id == self._round_id:
                    staged[rank] = reply
            time.sleep(TURN_S)
        error = first_error(staged)
        if error:
            raise ValueError(error)
        placing.request(Place(round_id=self._round_id, commit=True))

    def restoring(self, recover: Callable[[], Channel]) -> Callable[[], Channel]:
        """`recover`, with the placement in force on the ranks behind the channel that it gives."""

        def with_placement() -> Channel:
            channel = recover()
            try:
                self.restore(channel)
            except ValueError:  # for good: nobody else knows these ranks, and none of them may stay
                _placing(channel).kill()
                raise
            return channel

        return with_placement

    def _begin(self, channel: PlacementChannel, min_gain: float) -> None:
        self._steps = 0
        self._round_id += 1
        self._round = Round(self._round_id, min_gain, time.monotonic())
        channel.request(AskLoads(round_id=self._round_id))

    def _advance(self, channel: PlacementChannel) -> bool:
        """False when there was nothing to do."""
        current = self._round
        assert current is not None
        for rank, reply in channel.replies():
            if reply.round_id != current.round_id:
                continue
            if isinstance(reply, Loads):
                current.loads[rank] = reply
            elif current.staged is not None:
                current.staged[rank] = reply
        num_ranks = self.placement.num_ranks
        if current.staged is not None:
            return self._move_on(channel, current)
        if current.planner is not None:
            if current.planner.is_alive():
                return False
            self._stage(channel, current)
            return True
        if len(current.loads) < num_ranks:
            return False
        self._plan(current)
        return True

    def _plan(self, current: Round) -> None:
        shape, ranks = self._loads.shape, [current.loads[rank] for rank in sorted(current.loads)]
        try:
            counts = sum(counts_of(loads, shape) for loads in ranks)
            self._fingerprints = agreed_fingerprints(self.placement, ranks)
        except ValueError as error:
            self._finish(current, error=str(error))
            return
        self._loads = KEPT_LOADS * self._loads + counts
        current.planner = threading.Thread(
            target=self._find, args=(current, self._loads.copy()), name="lockstep-placement", daemon=True
        )
        current.planner.start()

    def _find(self, current: Round, loads: Counts) -> None:
        current.new = better_placement(self._model, self._per_node, self.placement, loads, current.min_gain)

    def _stage(self, channel: PlacementChannel, current: Round) -> None:
        if current.new is None:
            self._finish(current, error="planning failed; its traceback is in the log")
            return
        if current.new.same_as(self.placement):
            self._finish(current)
            return
        source = self._config.expert_source
        channel.request(stage(current.round_id, current.new, source, self._fingerprints, self._per_node))
        current.staged = {}
        if source == "ranks":
            moves = plan_moves(self.placement, current.new, self._per_node)
            size = 3 * self._model.moe_intermediate_size * self._model.hidden_size
            # Exchanges have room for the tokens of a full dispatch, whatever they run on.
            most = min(MOVE_VALUES, self._config.capacity * self._model.hidden_size)
            current.batches = with_last(list(in_batches(moves, size, most)))

    def _move_on(self, channel: PlacementChannel, current: Round) -> bool:
        """The next exchange, or the change once all is at hand."""
        assert current.staged is not None
        assert current.new is not None
        batch, is_last = next(current.batches, (None, True)) if current.batches is not None else (None, True)
        if batch is not None:
            channel.request(move_weights(current.round_id, batch, is_last=is_last))
            return True
        if len(current.staged) < self.placement.num_ranks:
            return False
        error = first_error(current.staged)
        # Beforehand: a request that fails may have reached the ranks of some nodes, which then have changed over.
        self._ranks_may_differ = self._ranks_may_differ or not error
        channel.request(Place(round_id=current.round_id, commit=not error))
        if error:
            self._finish(current, error=error)
            return True
        before = self.placement
        self.placement = current.new
        self._finish(current, before=before, num_moved=sum(reply.num_read for reply in current.staged.values()))
        return True

    def _finish(
        self, current: Round, *, before: Placement | None = None, num_moved: int = 0, error: str = ""
    ) -> None:
        loads = self._loads
        self.last = Rebalanced(
            round_id=current.round_id, num_moved=num_moved,
            imbalance_before=float(imbalance(before or self.placement, loads).mean()),
            imbalance_after=float(imbalance(self.placement, loads).mean()),
            elapsed_s=time.monotonic() - current.began, error=error,
        )
        self._round = None
        if self.on_round is not None:
            self.on_round(self.last)


def _placing(channel: object) -> PlacementChannel:
    assert isinstance(channel, PlacementChannel), type(channel)
    return channel
