"""What controller and ranks say to each other: plans and results as bytes, everything else as small msgpack maps.

Every message begins with eight bytes that name its kind, so that what follows keeps its alignment. Nothing in a message
is ever executed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import msgpack  # type: ignore[import-untyped]

from runtime.placement_messages import (
    AskLoads,
    Loads,
    MoveWeights,
    Place,
    PlacementReply,
    PlacementRequest,
    Stage,
    Staged,
)

PLANS, RESULT, CONTROL = b"LSPLANS\0", b"LSRESULT", b"LSCONTRL"
_TAG = 8
_PLANS = struct.Struct("<8sq")  # tag, step

Cause = Literal["user", "communication", "other"]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """rank -> controller: loaded; `facts` are integers such as `max_num_pages`."""

    facts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Start:
    """controller -> rank: allocate, then expect plans."""

    max_model_len: int
    num_pages: int


@dataclass(frozen=True, kw_only=True)
class Stop:
    """controller -> rank: no plan follows."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """rank -> controller: one line on what was raised, and when by the monotonic clock.

    `cause`: "user" for mistakes in configuration or files, "communication" for what another rank's end brings about.
    """

    error: str
    phase: str
    step_id: int
    time_ns: int
    cause: Cause


@dataclass(frozen=True, kw_only=True)
class LedgerPage:
    """rank -> controller, in debug mode: checksums of a step's collectives, for each group."""

    step_id: int
    digests: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """controller -> rank: note what the steps do from here on, or no longer (and send what is left)."""

    on: bool


@dataclass(frozen=True, kw_only=True)
class TracePage:
    """rank -> controller: some spans of a trace (runtime/trace.py).

    `clock`: whose clock the times are on; `sent_ns`: when this page left, by it. `num_dropped`: spans that got lost so
    far for want of room. `is_last`: no page follows before the next trace begins.
    """

    clock: str
    sent_ns: int
    names: Sequence[str]
    spans: bytes
    num_dropped: int
    is_last: bool


Control = Ready | Start | Stop | Failure | LedgerPage | Trace | TracePage | PlacementRequest | PlacementReply
_KINDS: dict[str, type[Control]] = {
    "ready": Ready, "start": Start, "stop": Stop, "failure": Failure, "ledger": LedgerPage, "trace": Trace,
    "trace_page": TracePage, "ask_loads": AskLoads, "loads": Loads, "stage": Stage, "move_weights": MoveWeights,
    "staged": Staged, "place": Place,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode_control(message: Control) -> bytes:
    packed: bytes = msgpack.packb({"type": _NAMES[type(message)], **asdict(message)})
    return CONTROL + packed


def decode_control(data: bytes) -> Control:
    """Raises ValueError for anything that is not a control message of this version."""
    if data[:_TAG] != CONTROL:
        raise ValueError(f"message begins with {data[:_TAG]!r}: expected {CONTROL!r}")
    try:
        values: Any = msgpack.unpackb(data[_TAG:])
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"control message of {len(data)} bytes is damaged: {error}") from None
    name = values.pop("type", None) if isinstance(values, dict) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or set(values) != {f.name for f in fields(kind)}:
        raise ValueError(f"unknown control message: {values!r}")
    return kind(**values)


def frame_plans(step_id: int, plans: bytes) -> bytes:
    """A message with the encoded plans of one step."""
    return _PLANS.pack(PLANS, step_id) + plans


def plans_of(data: bytes) -> tuple[int, memoryview]:
    """(step id, encoded plans) of a message made by `frame_plans`."""
    if len(data) < _PLANS.size or data[:_TAG] != PLANS:
        raise ValueError(f"message of {len(data)} bytes begins with {data[:_TAG]!r}: expected {PLANS!r}")
    _, step_id = _PLANS.unpack_from(data)
    return step_id, memoryview(data)[_PLANS.size :]


def frame_result(result: bytes) -> bytes:
    return RESULT + result


def kind_of(data: bytes) -> bytes:
    """One of PLANS, RESULT and CONTROL, for messages that are in order."""
    return data[:_TAG]


def result_of(data: bytes) -> memoryview:
    return memoryview(data)[_TAG:]
