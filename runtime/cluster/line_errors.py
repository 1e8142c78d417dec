"""What can go wrong on a line between hosts, each fault a class of its own; every message names the peer."""

from __future__ import annotations


class LineError(RuntimeError):
    """Any fault of a line."""


class LineClosed(LineError):
    """The peer, the network or this side has closed the line; nothing follows."""


class LineTimeout(LineError):
    """Nothing came, or nobody answered, in time."""


class LineCongested(LineError):
    """The peer does not take its frames and the queue is full; the frame was not sent and may be sent again."""


class FrameDamaged(LineError):
    """What came is no frame of this version, or not the one that was sent."""


class FrameTooLarge(LineError):
    """A frame longer than this line takes; nothing was allocated for it."""


class FrameLost(LineError):
    """A frame has a later number than the next one: those between are missing."""


class FrameRepeated(LineError):
    """A frame has a number that was there before."""


class FrameStale(LineError):
    """A message of an epoch that is over."""


class AuthenticationFailed(LineError):
    """The peer does not know the shared secret, or is no part of Lockstep."""


class VersionRefused(LineError):
    """The peer speaks another version of the protocol."""
