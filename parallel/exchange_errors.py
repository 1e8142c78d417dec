"""What can go wrong between ranks that exchange over sockets; every error names the rank."""

from __future__ import annotations


class ExchangeError(RuntimeError):
    """The groups of this epoch are of no use any more."""


class PeerLost(ExchangeError):
    """The connection to a rank broke or was closed: most likely it has died."""


class OutOfStep(ExchangeError):
    """A rank made another call than this one, or gave another number of bytes to it."""


class StaleEpoch(ExchangeError):
    """A rank is in a later epoch than this one."""


class ExchangeRefused(ExchangeError):
    """A rank does not have the secret, or speaks another version of the protocol."""


class PeersMissing(ExchangeError):
    """Ranks did not come in time."""
