"""What controller and relays say to each other, and keepers to the relay of their node.

Plans and results travel as the bytes that go into the rings, signs of life as the records of the vitals page; the rest
are small msgpack maps, decoded strictly. The number of the epoch is in the frame's header.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import msgpack  # type: ignore[import-untyped]

from runtime.cluster.message_fields import Message, checked_names, is_list_of, is_text, made, unpack

MAX_NODE_RANKS = 64  # as many as a ring has readers
_RANK = struct.Struct("<I")

class RelayFrame(IntEnum):
    """Kinds of frames on the line between controller and relay."""

    HELLO = 16  # relay -> controller, first: RelayHello
    OPEN = 17  # controller -> relay: OpenEpoch; ends the epoch before
    OPENED = 18  # relay -> controller: the memory is there
    CLOSE = 19  # controller -> relay: the epoch is over
    PLANS = 20  # controller -> relay: a message for the plan ring
    RESULT = 21  # relay -> controller: rank, then a message from its result ring
    VITALS = 22  # relay -> controller: the node's vitals page
    TROUBLE = 23  # relay -> controller: Trouble
    BEAT = 24  # both ways: this side lives and looks


@dataclass(frozen=True, kw_only=True)
class RelayHello:
    """relay -> controller: whose relay it is."""

    node_rank: int
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class GroupSegment:
    """Memory for the exchanges of some ranks of one node within the group `name` ("tp", "ep"): zeroed, `num_bytes`."""

    name: str
    ranks: Sequence[int]
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class OpenEpoch:
    """controller -> relay: make the memory of this epoch. `ranks` are those of this node, in order."""

    ranks: Sequence[int]
    plan_bytes: int  # of the largest message in the plan ring
    result_bytes: int  # and in each result ring
    slot_bytes: int  # handed on to ranks with the segments
    segments: Sequence[GroupSegment]


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """relay -> controller: a ring's fault ends the epoch. `error`: name of a class in runtime/ring_errors.py.

    `rank`: whose result ring it is, or -1: the plan ring, or memory that is not to be had (`error` is "OSError").
    """

    rank: int
    error: str
    text: str


@dataclass(frozen=True, kw_only=True)
class GrantRequest:
    """keeper -> relay: the memory of `rank` in `epoch`."""

    epoch: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class GrantReply:
    """relay -> keeper, with descriptors: plans, results, vitals, then one for each name in `segments`."""

    epoch: int
    index: int  # of the rank's reader in the plan ring and of its record on the vitals page
    slot_bytes: int
    segments: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class GrantRefusal:
    """relay -> keeper. `epoch`: the one that the relay is in, 0 for none."""

    epoch: int
    is_stale: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class EpochMemory:
    """The memory of one epoch on all nodes. `segments` only where several ranks of a group are on one node."""

    epoch: int  # 1 or more, above all before
    node_of_rank: Sequence[int]
    plan_bytes: int
    result_bytes: int
    slot_bytes: int = 0
    segments: Sequence[GroupSegment] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank)

    @property
    def nodes(self) -> list[int]:
        """Node ranks, in order."""
        return sorted(set(self.node_of_rank))

    def ranks_of(self, node: int) -> list[int]:
        """Ranks of a node, in order: their places in the plan ring and on the vitals page."""
        return [rank for rank, other in enumerate(self.node_of_rank) if other == node]

    def of_node(self, node: int) -> OpenEpoch:
        """What the relay of a node is told. Raises ValueError for a segment whose ranks are on several nodes."""
        mine = [segment for segment in self.segments if self._node_of(segment) == node]
        return OpenEpoch(
            ranks=self.ranks_of(node), plan_bytes=self.plan_bytes, result_bytes=self.result_bytes,
            slot_bytes=self.slot_bytes, segments=mine,
        )

    def _node_of(self, segment: GroupSegment) -> int:
        nodes = {self.node_of_rank[rank] for rank in segment.ranks}
        if len(nodes) != 1:
            raise ValueError(f"segment {segment.name!r} has ranks {list(segment.ranks)} on nodes {sorted(nodes)}")
        return nodes.pop()


def encode(message: object) -> bytes:
    """Any dataclass of this file but EpochMemory as a msgpack map."""
    packed: bytes = msgpack.packb(asdict(message))  # type: ignore[call-overload]
    return packed


def decode(kind: type[Message], data: bytes) -> Message:
    """A message of this kind. Raises ValueError for anything else: other fields, other types, numbers below -1."""
    values = unpack(data, kind.__name__)
    if kind is OpenEpoch:
        segments = checked_names(kind, values)["segments"]
        if not isinstance(segments, list):
            raise ValueError(f"{kind.__name__}.segments = {segments!r:.200}: expected a list")
        values["segments"] = [made(GroupSegment, segment, _FITS) for segment in segments]
    return made(kind, values, _FITS)


def frame_result(rank: int, data: bytes) -> bytes:
    """The body of a RESULT frame."""
    return _RANK.pack(rank) + data


def result_of(body: bytes) -> tuple[int, bytes]:
    """(rank, message). Raises ValueError for a body that is too short."""
    if len(body) < _RANK.size:
        raise ValueError(f"a result of {len(body)} bytes: expected at least {_RANK.size}")
    return int(_RANK.unpack_from(body)[0]), body[_RANK.size :]


def _all_are(kind: type[Any], value: Any) -> bool:
    return is_list_of(kind, value) and len(value) <= 2 * MAX_NODE_RANKS


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and -1 <= value < 1 << 63,
    "str": is_text,
    "bool": lambda value: isinstance(value, bool),
    "Sequence[int]": lambda value: _all_are(int, value),
    "Sequence[str]": lambda value: _all_are(str, value),
    "Sequence[GroupSegment]": lambda value: _all_are(GroupSegment, value),
}
