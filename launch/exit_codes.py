"""Exit codes of every process of a deployment, 69 to 78 as in BSD's sysexits. Every rank exits with the job's."""

from __future__ import annotations

from collections.abc import Mapping

EXIT_OK = 0  # asked to stop, and nothing was left undone
EXIT_FAILURE = 1  # any other failure; doctor found a fault that blocks
EXIT_USAGE = 2  # the command line or the configuration file
EXIT_PEER_LOST = 69  # a rank, a node or the controller is gone
EXIT_ENGINE = 70  # the engine or a worker died: a failed step, an error of the accelerator or its collectives
EXIT_TEMPORARY = 75  # a port is taken, weights are not there yet
EXIT_CONFIG = 78  # nodes disagree, or the configuration cannot fit
EXIT_INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT

MEANINGS: Mapping[int, tuple[str, str]] = {  # code -> what it means, who should act
    EXIT_OK: ("asked to stop, drained", "nobody"),
    EXIT_FAILURE: ("doctor found a blocking fault; any other failure", "a person"),
    EXIT_USAGE: ("bad command line or configuration file", "a person"),
    EXIT_PEER_LOST: ("a peer rank, a node or the controller is lost", "restart"),
    EXIT_ENGINE: ("the engine or a worker died", "restart"),
    EXIT_TEMPORARY: ("temporary: port taken, weights not there yet", "retry later"),
    EXIT_CONFIG: ("nodes disagree, or the configuration cannot fit", "a person; do not retry"),
}


def exit_code_of_signal(signal_number: int) -> int:
    """Of a process that a signal ended before it was drained."""
    return 128 + signal_number


def describe(code: int) -> str:
    """One line for a log: `69: a peer rank, a node or the controller is lost (restart)`."""
    if code in MEANINGS:
        meaning, action = MEANINGS[code]
        return f"{code}: {meaning} ({action})"
    if code < 0:  # as subprocess tells it
        return f"{code}: ended by signal {-code}"
    if code > 128:
        return f"{code}: ended by signal {code - 128}"
    return f"{code}: no code of ours"
