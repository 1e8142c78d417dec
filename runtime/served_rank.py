"""A Rank (runtime/rank.py) as the rank loop serves it: plans and results as bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from runtime.placement_messages import PlacementReply, PlacementRequest
from runtime.plan import decode_section
from runtime.rank import Rank
from runtime.result_codec import encode_result
from runtime.sizing import Sizes


class ServedRank:
    def __init__(self, rank: Rank, dp_rank: int) -> None:
        self._rank = rank
        self._dp_rank = dp_rank

    @property
    def facts(self) -> Mapping[str, int]:
        return asdict(self._rank.facts)

    def allocate(self, *, max_model_len: int, num_pages: int) -> None:
        self._rank.allocate(Sizes(max_model_len=max_model_len, num_pages=num_pages))

    def run(self, plans: memoryview, publish: Callable[[bytes], None]) -> None:
        plan = decode_section(plans, self._dp_rank)
        self._rank.run(plan, lambda result: publish(encode_result(result)))

    def take_digests(self) -> dict[str, int] | None:
        return self._rank.take_digests()

    @property
    def is_staging(self) -> bool:
        return self._rank.experts is not None and self._rank.experts.is_staging

    def place_experts(self, message: PlacementRequest) -> Sequence[PlacementReply]:
        assert self._rank.experts is not None, "experts have fixed places here"
        return self._rank.experts.take(message)

    def placement_replies(self) -> Sequence[PlacementReply]:
        return self._rank.experts.poll() if self._rank.experts is not None else ()

    def close(self) -> None:
        """The process ends next, and everything with it."""
