"""How a model is cut over the ranks: which part of a tensor is whose. Layouts that do not divide are refused here."""

from __future__ import annotations

from dataclasses import dataclass

from moe.placement import check_counts
from parallel.group import Group
from parallel.layout import Layout, RankGroups
from runtime.models.config import ModelConfig


def check_layout(config: ModelConfig, layout: Layout, redundant_experts: int = 0) -> None:
    """Raises ValueError with both numbers when the ranks of `layout` cannot share the model equally."""
    divided = [
        ("tp", layout.tp, "num_attention_heads", config.num_attention_heads),
        ("tp", layout.tp, "vocab_size", config.vocab_size),
    ]
    if config.num_dense_layers > 0:
        divided.append(("tp", layout.tp, "intermediate_size", config.intermediate_size))
    if config.num_experts > 0 and not redundant_experts:
        divided.append(("dp * tp", layout.ep, "n_routed_experts", config.num_experts))
    for axis, size, key, count in divided:
        if count % size:
            raise ValueError(f"{axis} = {size} does not divide {key} = {count}")
    if config.num_experts > 0 and redundant_experts:
        check_counts(config.num_experts, redundant_experts, layout.ep)


def block(total: int, group: Group) -> range:
    """This rank's share of `total` things: blocks of one size, in order of rank."""
    assert total % group.size == 0, (group.name, group.size, total)
    size = total // group.size
    return range(group.rank * size, (group.rank + 1) * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rectangle of the named tensor, whose whole shape is `shape`."""

    name: str
    shape: tuple[int, int]
    rows: slice
    cols: slice

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def num_cols(self) -> int:
        return int(self.cols.stop - self.cols.start)


@dataclass(frozen=True, slots=True)
class Shards:
    """Cuts tensors for one rank: rows or columns over tp, whole experts over ep."""

    groups: RankGroups

    def whole(self, name: str, rows: int, cols: int) -> Part:
        return Part(name=name, shape=(rows, cols), rows=slice(0, rows), cols=slice(0, cols))

    def rows(self, name: str, rows: int, cols: int) -> Part:
        """Heads, inner features or words: the part of the output that this rank computes."""
        own = block(rows, self.groups.tp)
        return Part(name=name, shape=(rows, cols), rows=slice(own.start, own.stop), cols=slice(0, cols))

    def cols(self, name: str, rows: int, cols: int) -> Part:
        """The part of the input that this rank has; the products of all ranks add up."""
        own = block(cols, self.groups.tp)
        return Part(name=name, shape=(rows, cols), rows=slice(0, rows), cols=slice(own.start, own.stop))

    def experts(self, total: int) -> range:
        return block(total, self.groups.ep)
