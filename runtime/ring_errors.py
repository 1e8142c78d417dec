"""What can go wrong with a ring, each fault a class of its own; every message names the ring and the reader."""

from __future__ import annotations


class RingError(RuntimeError):
    """Any fault of a ring."""


class MessageTooLarge(RingError):
    """The message would not fit into an empty ring."""


class ReaderLagging(RingError):
    """A reader that is alive did not take its messages in time; the message was not sent and may be sent again."""


class ReaderDead(RingError):
    """A reader's process is gone."""


class ReaderNotAttached(RingError):
    """A reader has not attached in time."""


class WriterDead(RingError):
    """The writer's process is gone, and everything it had sent has been read."""


class RingDamaged(RingError):
    """The memory does not hold what a writer of this version puts there: nothing more can be read from it."""


class RingTimeout(RingError):
    """No message came in time."""


class RingClosed(RingError):
    """The other side has closed its end (or this side has), and everything sent before has been read."""
