"""The experts that a rank holds in one layer, when they may be exchanged for others between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe.experts import GatedMlp, GroupedExperts
from moe.replicas import ReplicaMap


class PlacedLayer:
    """`experts` and `replicas` are what the layer runs with; `use` changes both at once."""

    def __init__(self, held: Sequence[int], mlps: Sequence[GatedMlp], table: Tensor) -> None:
        """held: the expert in each slot of this rank; mlps: the same; table: as in `ReplicaMap`."""
        assert len(held) == len(mlps), (len(held), len(mlps))
        self.held = tuple(held)
        self.experts, self.replicas = GroupedExperts(list(mlps)), ReplicaMap(table)

    def mlp(self, expert: int) -> GatedMlp:
        """An expert that this rank holds."""
        return self.experts.experts[self.held.index(expert)]

    def use(self, held: Sequence[int], mlps: Sequence[GatedMlp], table: Tensor) -> None:
        assert len(held) == len(mlps) == len(self.held), (len(held), len(mlps), len(self.held))
        self.held = tuple(held)
        self.experts.experts = list(mlps)
        self.replicas.use(table)
