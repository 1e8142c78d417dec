"""Who else belongs to a launch that is refused: all are told at once, before a launcher ends those that came late."""

from __future__ import annotations

import select
import time

from runtime.cluster.acceptor import Acceptor
from runtime.cluster.keeper_messages import Hello
from runtime.cluster.line import FrameLine

BYSTANDERS_S = 8.0  # launchers start workers of one launch within seconds of each other


def await_bystanders(
    acceptor: Acceptor, world_size: int, num_here: int, timeout_s: float = BYSTANDERS_S
) -> list[FrameLine]:
    """Lines of keepers that come until `world_size` have, `num_here` counted, or `timeout_s` is over.

    Relays that come meanwhile are turned away: their keepers end them.
    """
    lines: list[FrameLine] = []
    until = time.monotonic() + timeout_s
    while num_here + len(lines) < world_size and (left := until - time.monotonic()) > 0:
        select.select([acceptor], [], [], min(left, 0.2))
        for arrival in acceptor.take():
            if isinstance(arrival.hello, Hello):
                lines.append(arrival.line)
            else:
                arrival.line.close()
    return lines
