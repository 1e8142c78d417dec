"""What a cluster is told from outside: how long it waits, and what makes keepers one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.cluster.keeper_messages import Hello
from runtime.rank_watch import Patience


@dataclass(frozen=True, kw_only=True)
class ClusterLimits:
    """How long, in seconds, is waited for what: fields of [cluster] in launch/config.py.

    `gather_s`: for the first keeper; None waits for ever. `start_s`: for processes to be up, for the first time.
    `patience`: with the ranks of an epoch.
    """

    gather_s: float | None = None
    join_s: float = 25.0
    start_s: float = 300.0
    stall_s: float = 3.0
    reform_s: float = 60.0
    patience: Patience = Patience()


class LaunchRules(Protocol):
    """What makes keepers one launch (launch/launch_rules.py). All raise ValueError in one line or a table."""

    def arrived(self, hello: Hello) -> Hello:
        """The same, with the sender's clock seen from here; called as soon as it is here."""
        ...

    def check_some(self, hellos: Sequence[Hello]) -> None:
        """Refuse what cannot be one launch, whoever is still to come."""
        ...

    def compare(self, hellos: Sequence[Hello]) -> None:
        """Refuse other versions, configurations or model files than those of the others and of this process."""
        ...


class LaunchRefused(ValueError):
    """What has come is no launch of this deployment."""
