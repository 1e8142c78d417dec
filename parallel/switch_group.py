"""A group whose ranks stay while what they exchange through is replaced: models keep it over many epochs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parallel.group import Group, Pending, PendingRows


class SwitchGroup:
    """Passes every call to the group in use. Without one (before the first epoch, between two) a call is an error."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._group: Group | None = None

    def use(self, group: Group | None) -> None:
        """Exchange through `group` from now on; None: not at all. Nothing may be under way in the one before."""
        if group is not None and (group.name, group.rank, group.size) != (self.name, self.rank, self.size):
            raise ValueError(
                f"{group.name} with rank {group.rank} of {group.size} in the place of "
                f"{self.name} with rank {self.rank} of {self.size}"
            )
        self._group = group

    def all_gather(self, x: Tensor) -> Pending:
        return self._used().all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Pending:
        return self._used().reduce_scatter(x)

    def all_to_all(self, x: Tensor) -> Pending:
        return self._used().all_to_all(x)

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return self._used().all_to_all_uneven(x, send, receive)

    def all_to_all_sized(self, x: Tensor, send: Sequence[int], most: int) -> PendingRows:
        return self._used().all_to_all_sized(x, send, most)

    def _used(self) -> Group:
        if self._group is None:
            raise RuntimeError(f"{self.name}: the ranks of this group are not connected")
        return self._group
