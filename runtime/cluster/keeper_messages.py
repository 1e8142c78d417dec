"""What controller and keepers, and keepers and their ranks, say to each other: small msgpack maps, decoded strictly.

A keeper starts one rank and looks after it (launch/keeper.py). Processes of a rank are told apart by `serial`, which
its keeper counts; formations of all ranks by `epoch`, which the controller counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import msgpack  # type: ignore[import-untyped]

from runtime.cluster.message_fields import is_list_of, is_map_of_text, is_text, made, unpack

KEEPER_FRAME = 1  # the kind of frame (runtime/cluster/line.py) that these messages travel in


@dataclass(frozen=True, kw_only=True)
class Hello:
    """keeper -> controller, first: where it stands, as its launcher told it. `facts`: what all must agree on."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    source: str  # of these numbers: torchrun, slurm, ...
    host: str
    pid: int
    facts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """keeper -> controller: process `serial` of the rank is in no epoch and can join one. `left`: the last it was in.

    Other ranks reach it at `host`:`port`.
    """

    serial: int
    left: int
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class RankEnded:
    """keeper -> controller: exit code as of subprocess: -9 for SIGKILL. `text` adds what the keeper knows, or ""."""

    serial: int
    code: int
    text: str


@dataclass(frozen=True, kw_only=True)
class JoinFailed:
    """keeper -> controller: the memory of the epoch was not to be had from the relay of this node."""

    epoch: int
    text: str


@dataclass(frozen=True, kw_only=True)
class GaveUp:
    """keeper -> controller: it can do no more for the job, or was told to end (SIGTERM)."""

    code: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Join:
    """controller -> keeper: have process `serial` enter the epoch. Lists are in rank order."""

    epoch: int
    serial: int
    hosts: Sequence[str]
    ports: Sequence[int]
    nodes: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Abort:
    """controller -> keeper: the epoch is over. What has not left it within `leave_s` is killed and replaced."""

    epoch: int
    leave_s: float


@dataclass(frozen=True, kw_only=True)
class RestartRelay:
    """controller -> keeper with local rank 0: end this node's relay, and start another.

    `pid`: only if it still is this one; 0: whichever it is.
    """

    pid: int


@dataclass(frozen=True, kw_only=True)
class Ping:
    """Either way; answered by nothing. A line over which nothing comes is dead or its other end stands still."""


@dataclass(frozen=True, kw_only=True)
class End:
    """controller -> keeper: the job is over; end everything and exit with `code`, saying `text` unless it is ""."""

    code: int
    text: str


@dataclass(frozen=True, kw_only=True)
class RankStanding:
    """rank -> keeper: in no epoch; the last was `left` (0: none yet). Its exchanges are met at `port`."""

    left: int
    port: int


@dataclass(frozen=True, kw_only=True)
class RankLoaded:
    """rank -> keeper: it has its weights, so that others may use the processor and the disk."""


@dataclass(frozen=True, kw_only=True)
class RankJoin:
    """keeper -> rank, with descriptors: plans, results, vitals, then one for each name in `segments`."""

    epoch: int
    hosts: Sequence[str]
    ports: Sequence[int]
    nodes: Sequence[int]
    plans_index: int  # which reader of the plan ring this rank is
    vitals_index: int
    segments: Sequence[str]  # groups with peers on this node
    slot_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankAbort:
    """keeper -> rank: leave the epoch at once, and keep the weights."""

    epoch: int


FromKeeper = Standing | RankEnded | JoinFailed | GaveUp | Ping  # after Hello
ToKeeper = Join | Abort | RestartRelay | Ping | End
FromRank = RankStanding | RankLoaded
ToRank = RankJoin | RankAbort


def encode(message: object) -> bytes:
    """One of the messages above as bytes."""
    packed: bytes = msgpack.packb({"type": type(message).__name__, **asdict(message)})  # type: ignore[call-overload]
    return packed


def decode_hello(data: bytes) -> Hello:
    """Raises ValueError, naming what came, for anything else; so do the following."""
    message: Hello = _decode(data, (Hello,))
    return message


def decode_from_keeper(data: bytes) -> FromKeeper:
    message: FromKeeper = _decode(data, get_args(FromKeeper))
    return message


def decode_to_keeper(data: bytes) -> ToKeeper:
    message: ToKeeper = _decode(data, get_args(ToKeeper))
    return message


def decode_from_rank(data: bytes) -> FromRank:
    message: FromRank = _decode(data, get_args(FromRank))
    return message


def decode_to_rank(data: bytes) -> ToRank:
    message: ToRank = _decode(data, get_args(ToRank))
    return message


def _decode(data: bytes, kinds: Sequence[type[Any]]) -> Any:
    values = unpack(data, "message")
    name = values.pop("type", None) if isinstance(values, dict) else None
    kind = next((kind for kind in kinds if kind.__name__ == name), None)
    if kind is None:
        raise ValueError(f"message of type {name!r}: expected one of {', '.join(k.__name__ for k in kinds)}")
    return made(kind, values, _FITS)


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) in (int, float),
    "str": is_text,
    "Sequence[int]": lambda value: is_list_of(int, value),
    "Sequence[str]": lambda value: is_list_of(str, value),
    "Mapping[str, str]": is_map_of_text,
}
