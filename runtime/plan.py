"""StepPlan: everything the ranks must know for one step, and its codec.

A plan is a diff in struct-of-arrays form. Running requests appear as slot numbers only, so the plan of a decode step
has the same size whatever the lengths of prompts and outputs.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.sampling_params import PARAM_DTYPE

Int32Array = NDArray[np.int32]

MAGIC = b"LSPL"
VERSION = 2
# magic, version, flags, step, k, verify rows, logprobs, capacities (3), arrays, body bytes
_SCALARS = struct.Struct("<4sHHqiiiiiiiI4x")
_CHECKSUM = struct.Struct("<I")  # of the scalars and the body
_HEADER_SIZE = _SCALARS.size + _CHECKSUM.size
_FLAG_SPLIT = 1
_FLAG_CAPACITIES = 2
_ALIGN = 8


@dataclass(frozen=True, kw_only=True)
class PlanArrays:
    """The arrays of a plan, in wire order. R rows, verify rows first; N new requests; G new pages; F freed slots.

    `starts` is the first position of a prefill row and -1 for a verify row, whose position lives on the device.
    `kv_bounds` is the host's upper bound of the positions a row attends to: it sizes gathers, never masks.
    `samples` marks rows that yield tokens; `carries` rows after which the drafter's state is complete.
    New requests come in full: `new_tokens` are all committed tokens, so resuming looks like starting.
    """

    slots: Int32Array  # [R]
    num_tokens: Int32Array  # [R]
    starts: Int32Array  # [R]
    kv_bounds: Int32Array  # [R]
    samples: Int32Array  # [R] 0 / 1
    carries: Int32Array  # [R] 0 / 1
    page_slots: Int32Array  # [G]
    page_index: Int32Array  # [G] which entry of the slot's page table
    pages: Int32Array  # [G]
    freed_slots: Int32Array  # [F]
    new_slots: Int32Array  # [N]
    new_limits: Int32Array  # [N] committed length at which the request ends
    new_cu_tokens: Int32Array  # [N + 1]
    new_tokens: Int32Array  # [new_cu_tokens[-1]]
    new_params: NDArray[np.uint8]  # [N * PARAM_DTYPE.itemsize] (runtime/sampling_params.py)
    new_bias_ids: Int32Array  # ragged; the counts are in new_params
    new_bias_values: NDArray[np.float32]
    new_masked_ids: Int32Array  # ragged; EOS and stop ids, barred until min_tokens


_DTYPES: dict[str, np.dtype[Any]] = {f.name: np.dtype(np.int32) for f in fields(PlanArrays)}
_DTYPES["new_params"] = np.dtype(np.uint8)
_DTYPES["new_bias_values"] = np.dtype(np.float32)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step of one dp group: scalars that shape every collective, and the arrays.

    The plans of all groups for a step agree in the scalars, but for `num_verify` and `num_logprobs`. `capacities`: the
    most tokens that any group has in half A (or the whole pass), in half B, and in a drafter's single-token pass.
    """

    step_id: int
    k: int
    num_verify: int
    num_logprobs: int  # largest asked for in this step; -1: none
    split: bool
    arrays: PlanArrays
    capacities: tuple[int, int, int] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.arrays.slots)


def encode(plan: StepPlan) -> bytes:
    """Bytes of a plan: a fixed header, the length of every array, then the arrays at 8-byte boundaries."""
    arrays = [getattr(plan.arrays, name) for name in _DTYPES]
    parts = [np.array([len(a) for a in arrays], np.int32).tobytes()]
    for array in arrays:
        if len(array):
            raw = array.tobytes()
            parts += (raw, b"\0" * (-len(raw) % _ALIGN))
    body = b"".join(parts)
    flags = _FLAG_SPLIT * plan.split | _FLAG_CAPACITIES * (plan.capacities is not None)
    scalars = _SCALARS.pack(
        MAGIC, VERSION, flags, plan.step_id, plan.k, plan.num_verify, plan.num_logprobs,
        *(plan.capacities or (0, 0, 0)), len(arrays), len(body),
    )
    return b"".join((scalars, _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(scalars))), body))


def decode(data: bytes | memoryview) -> StepPlan:
    """The plan in `data`. Raises ValueError saying which field is wrong; nothing in it is ever executed."""
    if len(data) < _HEADER_SIZE:
        raise ValueError(f"plan of {len(data)} bytes is shorter than its header of {_HEADER_SIZE}")
    magic, version, flags, step_id, k, num_verify, num_logprobs, *capacities, count, size = _SCALARS.unpack_from(data)
    if magic != MAGIC or version != VERSION or count != len(_DTYPES):
        raise ValueError(f"not a plan of version {VERSION}: magic {magic!r}, version {version}, {count} arrays")
    view = memoryview(data)
    body = view[_HEADER_SIZE:]
    (expected,) = _CHECKSUM.unpack_from(data, _SCALARS.size)
    checksum = zlib.crc32(body, zlib.crc32(view[: _SCALARS.size]))
    if len(body) != size or checksum != expected:
        raise ValueError(f"plan {step_id} is damaged: {len(body)} bytes of {size}, checksum {checksum} of {expected}")
    plan = StepPlan(
        step_id=step_id, k=k, num_verify=num_verify, num_logprobs=num_logprobs, split=bool(flags & _FLAG_SPLIT),
        arrays=_read_arrays(step_id, body),
        capacities=(capacities[0], capacities[1], capacities[2]) if flags & _FLAG_CAPACITIES else None,
    )
    if flags & ~(_FLAG_SPLIT | _FLAG_CAPACITIES) or k < 0 or not 0 <= num_verify <= plan.num_rows:
        raise ValueError(
            f"plan {step_id}: flags = {flags:#x}, k = {k}, num_verify = {num_verify} of {plan.num_rows} rows"
        )
    return plan


def encode_step(plans: Sequence[StepPlan]) -> bytes:
    """All groups' plans of one step: how many, the length of each, then the plans at 8-byte boundaries."""
    encoded = [encode(plan) for plan in plans]
    lengths = np.array([len(encoded), *(len(e) for e in encoded)], np.int64).tobytes()
    return b"".join((lengths, *(part for e in encoded for part in (e, b"\0" * (-len(e) % _ALIGN)))))


def decode_section(data: bytes | memoryview, group: int) -> StepPlan:
    """The plan of one group in what `encode_step` made. Raises ValueError saying what is wrong."""
    view = memoryview(data)
    count = int(np.frombuffer(view, np.int64, 1)[0]) if len(view) >= 8 else 0
    if not group < count <= (len(view) - 8) // 8:
        raise ValueError(f"step of {len(view)} bytes with {count} sections: expected one for group {group}")
    lengths = np.frombuffer(view, np.int64, count, 8)
    begins = 8 * (1 + count) + np.concatenate(([0], np.cumsum(lengths + -lengths % _ALIGN)))
    if lengths.min() < 0 or begins[-1] != len(view):
        raise ValueError(f"step of {len(view)} bytes: sections of {lengths.tolist()} bytes do not fill it")
    begin = int(begins[group])
    return decode(view[begin : begin + int(lengths[group])])


def _read_arrays(step_id: int, body: memoryview) -> PlanArrays:
    """The arrays of a body: the lengths come first. Raises ValueError naming the array that does not fit."""
    offset = 4 * len(_DTYPES)
    if len(body) < offset:
        raise ValueError(f"plan {step_id}: {len(body)} bytes do not hold the lengths of {len(_DTYPES)} arrays")
    lengths = np.frombuffer(body, np.int32, len(_DTYPES))
    found: dict[str, NDArray[np.generic]] = {}
    for (name, dtype), length in zip(_DTYPES.items(), lengths.tolist(), strict=True):
        num_bytes = length * dtype.itemsize
        if length < 0 or offset + num_bytes > len(body):
            raise ValueError(f"plan {step_id}: array {name} of {length} entries does not fit in {len(body)} bytes")
        found[name] = np.frombuffer(body, dtype, length, offset)
        offset += num_bytes + -num_bytes % _ALIGN
    if offset != len(body):
        raise ValueError(f"plan {step_id}: {len(body) - offset} bytes after the last array")
    arrays = PlanArrays(**found)  # type: ignore[arg-type]
    for name, length in _expected_lengths(arrays):
        if len(found[name]) != length:
            raise ValueError(f"plan {step_id}: array {name} of {len(found[name])} entries: expected {length}")
    offsets = arrays.new_cu_tokens
    if offsets[0] != 0 or (len(offsets) > 1 and bool((offsets[1:] < offsets[:-1]).any())):
        raise ValueError(f"plan {step_id}: array new_cu_tokens does not run upwards from 0")
    return arrays


def _expected_lengths(arrays: PlanArrays) -> Iterator[tuple[str, int]]:
    """What the lengths of some arrays say about others."""
    for name in ("num_tokens", "starts", "kv_bounds", "samples", "carries"):
        yield name, len(arrays.slots)
    for name in ("page_index", "pages"):
        yield name, len(arrays.page_slots)
    num_new = len(arrays.new_slots)
    yield "new_limits", num_new
    yield "new_cu_tokens", num_new + 1
    yield "new_tokens", int(arrays.new_cu_tokens[-1])
    yield "new_params", num_new * PARAM_DTYPE.itemsize
    rows = np.frombuffer(arrays.new_params, PARAM_DTYPE)
    yield "new_bias_ids", int(rows["num_bias"].sum()) if num_new else 0
    yield "new_bias_values", len(arrays.new_bias_ids)
    yield "new_masked_ids", int(rows["num_masked"].sum()) if num_new else 0


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step hands back: row order is the plan's. Host arrays; `counts` is 0 where a row yields no token."""

    step_id: int
    counts: Int32Array  # [R] committed tokens
    token_ids: Int32Array  # [R, 1 + k], the first counts[r] of each row are valid
    bad: NDArray[np.bool_]  # [R] NaN or out-of-range values in the row
    chosen_logprobs: NDArray[np.float32] | None = None  # [R, 1 + k]
    top_ids: Int32Array | None = None  # [R, 1 + k, num_logprobs]
    top_logprobs: NDArray[np.float32] | None = None  # [R, 1 + k, num_logprobs]
