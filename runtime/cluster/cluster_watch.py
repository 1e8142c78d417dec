"""A watch over ranks of several hosts: relays and keepers can be at fault, and no rank is killed for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.cluster.rank_handle import RankHandle
from runtime.rank_watch import HANGS, STANDS_STILL, Diagnosis, Patience, RankWatch, VitalsReader
from runtime.vitals import RankVital


class ClusterWatch(RankWatch):
    """`trouble` tells of what is wrong with relays or the forming of this epoch, "" while nothing is."""

    def __init__(
        self, names: Sequence[str], handles: Sequence[RankHandle], vitals: VitalsReader, patience: Patience,
        trouble: Callable[[], str],
    ) -> None:
        super().__init__(names, handles, vitals, patience)
        self._handles, self._trouble = handles, trouble

    def look(self, exited: Sequence[int], *, in_step: bool = False) -> Diagnosis | None:
        trouble = self._trouble()
        if trouble:
            return Diagnosis(message=trouble)
        return super().look(exited, in_step=in_step)

    def kill(self) -> None:
        """Survivors keep their weights; whoever forms the next epoch says who is replaced."""

    @property
    def stuck(self) -> list[int]:
        """Ranks that stand still or hang."""
        return [rank for rank, suspect in self._suspects.items() if suspect.category in (STANDS_STILL, HANGS)]

    def _ended(self, vital: RankVital) -> str:
        text = self._handles[vital.rank].keeper_text
        return f"{self._names[vital.rank]}: {text}" if text else super()._ended(vital)
