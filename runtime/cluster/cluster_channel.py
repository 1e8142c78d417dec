"""The channel of one epoch of a cluster: when it fails ranks stay, when it is closed everything ends."""

from __future__ import annotations

from collections.abc import Callable

from parallel.layout import Layout
from runtime.cluster.cluster_watch import ClusterWatch
from runtime.cluster.epoch_ports import EpochPorts
from runtime.rank_channel import RankChannel


class ClusterChannel(RankChannel):
    """`on_end` is told when the engine is done with the deployment: with what failed, None if nothing had."""

    def __init__(
        self, layout: Layout, ports: EpochPorts, watch: ClusterWatch, *, step_timeout_s: float,
        on_end: Callable[[str | None], None],
    ) -> None:
        super().__init__(
            layout, ports.plans, ports.results, ports.vitals, watch, step_timeout_s=step_timeout_s
        )
        self._on_end = on_end

    def let_go(self) -> None:
        """End this epoch here; ranks stay."""
        super().kill()

    def close(self) -> None:
        failure = None if self._failure is None else str(self._failure)
        super().close()
        self._on_end(failure)

    def kill(self) -> None:
        super().kill()
        self._on_end(str(self._failure))
