"""One rank: its share of the weights, its caches and tables, and the executor over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from parallel.group import Group
from parallel.layout import RankGroups
from runtime.config import EngineConfig
from runtime.device_state import DeviceState
from runtime.executor import Executor, Publish
from runtime.loading import LoadedModel, load_model
from runtime.plan import StepPlan
from runtime.rank_experts import RankExperts
from runtime.sizing import Sizes, choose_sizes


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What the controller has to know of a loaded rank."""

    num_pages: int  # as many KV pages as this rank would allocate
    capacity: int  # tokens it can send to the experts at once
    bytes_read: int  # of weights


def settle(ranks: Sequence[Mapping[str, int]]) -> int:
    """KV pages that every rank can hold, from the facts of all of them.

    Raises ValueError when the ranks are not made for the same exchanges: they would block each other for ever.
    """
    capacities = [rank["capacity"] for rank in ranks]
    if len(set(capacities)) > 1:
        first = next(i for i, capacity in enumerate(capacities) if capacity != capacities[0])
        raise ValueError(
            f"rank 0 dispatches up to {capacities[0]} tokens and rank {first} up to {capacities[first]}: set "
            f"parallel.dispatch_capacity to {max(capacities)} on all ranks"
        )
    return min(rank["num_pages"] for rank in ranks)


class Rank:
    """Loaded first; the caches follow when the controller has settled the sizes that all ranks agree on."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, groups: RankGroups, phase: Callable[[str], None]
    ) -> None:
        self._config, self._loaded, self._groups, self._phase = config, loaded, groups, phase
        self._executor: Executor | None = None
        self.experts = RankExperts(loaded.experts, groups.ep) if loaded.experts is not None else None

    @classmethod
    def load(cls, config: EngineConfig, groups: RankGroups, *, phase: Callable[[str], None]) -> Rank:
        """Raises ValueError or FileNotFoundError, in one line, as `load_model` does."""
        phase("loading weights")
        return cls(config, load_model(config, groups, phase=phase), groups, phase)

    @property
    def facts(self) -> RankFacts:
        sizes = choose_sizes(self._config, self._loaded.facts)
        return RankFacts(
            num_pages=sizes.num_pages, capacity=self._config.capacity, bytes_read=self._loaded.bytes_read
        )

    def allocate(self, sizes: Sizes) -> None:
        """Fresh caches and tables; those of an earlier epoch go first, there may be no room for both."""
        self._executor = None
        self._executor = build_executor(
            self._config, self._loaded, sizes, tp=self._groups.tp, phase=self._phase
        )

    def run(self, plan: StepPlan, publish: Publish) -> None:
        """One step with the plan of this rank's dp group; every rank of the group publishes the same result."""
        assert self._executor is not None, "allocate() comes first"
        assert plan.arrays.num_tokens.sum() <= self._config.capacity * self._config.tp, "more tokens than agreed on"
        ledger = self._groups.ledger
        if ledger is not None:
            ledger.step = plan.step_id
        self._executor.run(plan, publish)

    def take_digests(self) -> dict[str, int] | None:
        """Of the collectives of the steps since the last call, for each group; None when not in debug mode."""
        return self._groups.ledger.take_digests() if self._groups.ledger is not None else None


def build_executor(
    config: EngineConfig, loaded: LoadedModel, sizes: Sizes, *, tp: Group | None = None,
    phase: Callable[[str], None] | None = None,
) -> Executor:
    state = DeviceState(
        num_slots=config.max_num_seqs + 1, max_model_len=sizes.max_model_len, page_size=config.page_size,
        vocab_size=loaded.facts.vocab_size, device=loaded.device, debug=config.debug,
        carried_shapes=loaded.drafter.carried_shapes() if loaded.drafter is not None else {},
    )
    return Executor(loaded.model, loaded.drafter, state, sizes.num_pages, tp=tp, phase=phase)
