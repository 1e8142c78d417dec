"""The relay process of a node: `python -m launch.relay_main`, with its specification as JSON on standard input.

Started by the keeper of the node's first rank, and again by it whenever it has ended. It ends with its keeper, and with
its line to the controller. It imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial

from launch.exit_codes import EXIT_CONFIG, EXIT_PEER_LOST, EXIT_TEMPORARY
from launch.rank_main import EXIT_ORPHANED, die_with_parent, exit_if_orphaned
from runtime.cluster.grants import GrantServer
from runtime.cluster.line import AuthenticationFailed, LineClosed, LineError, LineTimeout, VersionRefused, connect_line
from runtime.cluster.relay import Relay

ROLE = "relay"
CONNECT_S = 10.0  # then its keeper starts another, if there is still something to relay


@dataclass(frozen=True, kw_only=True)
class RelaySpec:
    """Everything a relay is told at birth."""

    parent_pid: int
    node_rank: int
    controller_host: str
    controller_port: int
    secret: str  # in hexadecimal
    socket_name: str  # at which keepers ask for memory (runtime/cluster/grants.py)
    host: str  # the node's name, for messages

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RelaySpec:
        return cls(**json.loads(data))


def main() -> None:
    """Be the relay that standard input describes; never returns."""
    die_with_parent()
    data = sys.stdin.buffer.read()
    if not data:
        os._exit(EXIT_ORPHANED)
    spec = RelaySpec.from_json(data)
    exit_if_orphaned(spec.parent_pid)  # it may have ended before the first line of this function
    code = _relay(spec)
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for ranks


def _relay(spec: RelaySpec) -> int:
    """The exit code. What a relay has to complain about goes to standard error, in one line."""
    try:
        grants = GrantServer(spec.socket_name)
        line = connect_line(
            spec.controller_host, spec.controller_port, secret=bytes.fromhex(spec.secret), role=ROLE,
            timeout_s=CONNECT_S,
        )
        check = partial(exit_if_orphaned, spec.parent_pid)
        Relay(line, grants, spec.node_rank, host=spec.host, check=check).serve()
    except LineClosed:
        return EXIT_PEER_LOST  # the keeper has lost its line, too, or starts another relay: either way it is told
    except LineTimeout as error:
        return _complain(spec, error, EXIT_TEMPORARY)
    except (AuthenticationFailed, VersionRefused) as error:
        return _complain(spec, error, EXIT_CONFIG)
    except (LineError, ValueError) as error:
        return _complain(spec, error, EXIT_PEER_LOST)


def _complain(spec: RelaySpec, error: Exception, code: int) -> int:
    sys.stderr.write(f"relay of node {spec.node_rank}: {error}\n")
    return code


if __name__ == "__main__":
    main()
