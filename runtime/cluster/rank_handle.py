"""A rank on another host as runtime/rank_watch.py sees it: a process of which keepers tell."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from runtime.cluster.membership import Membership

LOST_KEEPER = -9  # the code of a rank whose keeper is gone: Linux kills it with that
POLL_S = 0.02


class RankHandle:
    """The process of `rank` that is in the epoch now. `poll_keepers` takes in what keepers have said."""

    pid = -1  # on another host

    def __init__(self, rank: int, membership: Membership, poll_keepers: Callable[[], None]) -> None:
        self._rank, self._membership, self._poll_keepers = rank, membership, poll_keepers

    def poll(self) -> int | None:
        self._poll_keepers()
        died = self._membership.died(self._rank)
        if died is None:
            return None
        return LOST_KEEPER if died.code is None else died.code

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or 0.0)
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"rank {self._rank}", timeout)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        """Whoever forms the next epoch says who is replaced; the others keep their weights."""

    @property
    def keeper_text(self) -> str:
        """What happened to its keeper, or ""."""
        died = self._membership.died(self._rank)
        return died.text if died is not None and died.code is None else ""
