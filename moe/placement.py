"""Where each expert of each layer lives: ranks have equally many slots, and a busy expert may have several."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = "lockstep expert placement 1"
SHARE_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """`experts[l, r, s]` is the expert in slot s of rank r in layer `layers[l]`, `shares` what part of its tokens goes
    there: over all slots of an expert they sum to 1. Where a rank holds an expert twice, the first slot serves it.
    """

    layers: tuple[int, ...]  # the model's numbers of its MoE layers, ascending
    num_experts: int
    experts: NDArray[np.int32]  # [num_layers, num_ranks, num_slots]
    shares: NDArray[np.float32]  # the same

    @property
    def num_ranks(self) -> int:
        return int(self.experts.shape[1])

    @property
    def num_slots(self) -> int:
        """Experts that each rank holds in a layer."""
        return int(self.experts.shape[2])

    def index(self, layer: int) -> int:
        """Where the model's layer number `layer` stands in the arrays."""
        return self.layers.index(layer)

    def rank_shares(self) -> NDArray[np.float64]:
        """[num_layers, num_experts, num_ranks]: the part of an expert's tokens that a rank serves."""
        found = np.zeros((len(self.layers), self.num_experts, self.num_ranks))
        layer, rank, _ = np.indices(self.experts.shape)
        np.add.at(found, (layer, self.experts, rank), self.shares)
        return found

    def layer_shares(self, layer: int) -> NDArray[np.float64]:
        """[num_experts, num_ranks] of the model's layer number `layer`."""
        idx = self.index(layer)
        found = np.zeros((self.num_experts, self.num_ranks))
        np.add.at(found, (self.experts[idx], np.arange(self.num_ranks)[:, None]), self.shares[idx])
        return found

    def holds(self) -> NDArray[np.bool_]:
        """[num_layers, num_experts, num_ranks]: who holds what."""
        found = np.zeros((len(self.layers), self.num_experts, self.num_ranks), bool)
        layer, rank, _ = np.indices(self.experts.shape)
        found[layer, self.experts, rank] = True
        return found

    def rank_loads(self, loads: NDArray[np.float64]) -> NDArray[np.float64]:
        """[num_layers, num_experts] tokens -> [num_layers, num_ranks] tokens."""
        found: NDArray[np.float64] = np.einsum("ler,le->lr", self.rank_shares(), loads)
        return found

    def same_as(self, other: Placement) -> bool:
        return (
            self.layers == other.layers and np.array_equal(self.experts, other.experts)
            and np.array_equal(self.shares, other.shares)
        )


def imbalance(placement: Placement, loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """[num_layers]: the busiest rank's load over the mean of all ranks, at least 1; 1 for a layer without load."""
    ranks = placement.rank_loads(loads)
    mean = ranks.mean(1)
    found: NDArray[np.float64] = np.divide(ranks.max(1), mean, where=mean > 0, out=np.ones_like(mean))
    return found


def check_counts(num_experts: int, redundant_experts: int, num_ranks: int) -> int:
    """Slots a rank has in a layer. Raises ValueError where physical experts do not divide, or are too many."""
    num_physical = num_experts + redundant_experts
    if num_physical % num_ranks:
        fit = -num_experts % num_ranks
        raise ValueError(
            f"redundant_experts = {redundant_experts}: {num_experts} + {redundant_experts} experts do not divide by "
            f"the {num_ranks} ranks of dp x tp; {fit} or {fit + num_ranks} would"
        )
    most = (num_ranks - 1) * num_experts
    if redundant_experts > most:
        raise ValueError(
            f"redundant_experts = {redundant_experts}: with {most} each of {num_ranks} ranks holds all {num_experts} "
            "experts; more have no use"
        )
    return num_physical // num_ranks


def check_placement(placement: Placement, source: str) -> None:
    """Raises ValueError naming `source`, layer and expert when tokens would find no expert, or not all of them."""
    shape = placement.experts.shape
    if len(shape) != 3 or shape[0] != len(placement.layers) or placement.shares.shape != shape:
        raise ValueError(f"{source}: experts of shape {shape}, shares of shape {placement.shares.shape}")
    outside = placement.experts[(placement.experts < 0) | (placement.experts >= placement.num_experts)]
    if outside.size:
        raise ValueError(f"{source}: expert {int(outside[0])}: expected 0..{placement.num_experts - 1}")
    if not (placement.shares >= 0).all():
        raise ValueError(f"{source}: a share is negative or not a number")
    missing = np.argwhere(~placement.holds().any(2))
    if len(missing):
        raise ValueError(f"{source}: layer {placement.layers[missing[0][0]]}: expert {missing[0][1]} is on no rank")
    sums = placement.rank_shares().sum(2)  # [num_layers, num_experts]
    wrong = np.argwhere(np.abs(sums - 1) > SHARE_TOLERANCE)
    if len(wrong):
        layer, expert = wrong[0]
        raise ValueError(
            f"{source}: layer {placement.layers[layer]}: the shares of expert {expert} sum to {sums[layer, expert]:g}, "
            "expected 1"
        )


def to_values(placement: Placement) -> dict[str, Any]:
    """As plain values: what a file or a message holds."""
    return {
        "format": FORMAT, "layers": list(placement.layers), "num_experts": placement.num_experts,
        "experts": placement.experts.tolist(), "shares": np.round(placement.shares, 6).tolist(),
    }


def from_values(values: Mapping[str, Any], source: str) -> Placement:
    """Raises ValueError naming `source` for anything but a placement."""
    if not isinstance(values, Mapping) or values.get("format") != FORMAT:
        raise ValueError(f"{source}: expected an object with format {FORMAT!r}")
    try:
        placement = Placement(
            layers=tuple(int(layer) for layer in values["layers"]), num_experts=int(values["num_experts"]),
            experts=np.array(values["experts"], np.int32), shares=np.array(values["shares"], np.float32),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{source}: not a placement: {type(error).__name__} {error}") from None
    check_placement(placement, source)
    return placement


def save_placement(placement: Placement, path: Path) -> None:
    path.write_text(json.dumps(to_values(placement)) + "\n", encoding="utf-8")


def load_placement(path: Path, layers: Sequence[int], num_experts: int, num_ranks: int, num_slots: int) -> Placement:
    """Raises ValueError or FileNotFoundError naming the file and what does not fit this model and layout."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"placement_file = {path}: no such file") from None
    except ValueError as error:
        raise ValueError(f"placement_file = {path}: not JSON: {error}") from None
    placement = from_values(values, f"placement_file = {path}")
    found = {
        "layers": list(placement.layers), "num_experts": placement.num_experts, "ranks": placement.num_ranks,
        "slots a rank": placement.num_slots,
    }
    expected = {"layers": list(layers), "num_experts": num_experts, "ranks": num_ranks, "slots a rank": num_slots}
    for name, value in expected.items():
        if found[name] != value:
            raise ValueError(f"placement_file = {path}: made for {name} {found[name]}, here are {value}")
    return placement
