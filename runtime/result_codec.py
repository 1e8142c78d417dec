"""Bytes of a StepResult, for its way from a rank to the controller."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from runtime.plan import StepResult

MAGIC = b"LSRS"
VERSION = 1
_SCALARS = struct.Struct("<4sHHqiii")  # magic, version, 0, step, rows, tokens a row, top logprobs (-1: no logprobs)
_CHECKSUM = struct.Struct("<I")  # of the scalars and the body
_HEADER_SIZE = _SCALARS.size + _CHECKSUM.size


def encode_result(result: StepResult) -> bytes:
    """A fixed header, then the arrays one after the other, the 4-byte ones first."""
    num_rows, width = result.token_ids.shape
    num_top = -1 if result.top_ids is None else result.top_ids.shape[2]
    parts = [np.ascontiguousarray(getattr(result, name), dtype).tobytes() for name, dtype, _ in
             _arrays(num_rows, width, num_top)]
    body = b"".join(parts)
    scalars = _SCALARS.pack(MAGIC, VERSION, 0, result.step_id, num_rows, width, num_top)
    return b"".join((scalars, _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(scalars))), body))


def decode_result(data: bytes | memoryview) -> StepResult:
    """The result in `data`, as read-only arrays. Raises ValueError saying what is wrong."""
    if len(data) < _HEADER_SIZE:
        raise ValueError(f"result of {len(data)} bytes is shorter than its header of {_HEADER_SIZE}")
    view = memoryview(data)
    magic, version, zero, step_id, num_rows, width, num_top = _SCALARS.unpack_from(view)
    if magic != MAGIC or version != VERSION or zero:
        raise ValueError(f"not a result of version {VERSION}: magic {magic!r}, version {version}")
    body = view[_HEADER_SIZE:]
    (expected,) = _CHECKSUM.unpack_from(view, _SCALARS.size)
    checksum = zlib.crc32(body, zlib.crc32(view[: _SCALARS.size]))
    if checksum != expected:
        raise ValueError(f"result {step_id} is damaged: checksum {checksum} of {expected}")
    if num_rows < 0 or width < 1 or num_top < -1:
        raise ValueError(f"result {step_id}: {num_rows} rows of {width} tokens, {num_top} top logprobs")
    found: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in _arrays(num_rows, width, num_top):
        count = int(np.prod(shape))
        if offset + count * dtype.itemsize > len(body):
            raise ValueError(f"result {step_id}: array {name} of shape {shape} does not fit in {len(body)} bytes")
        found[name] = np.frombuffer(body, dtype, count, offset).reshape(shape)
        offset += count * dtype.itemsize
    if offset != len(body):
        raise ValueError(f"result {step_id}: {len(body) - offset} bytes after the last array")
    return StepResult(step_id=step_id, **found)


def _arrays(num_rows: int, width: int, num_top: int) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    """Name, type and shape of each array, in wire order."""
    int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
    yield "counts", int32, (num_rows,)
    yield "token_ids", int32, (num_rows, width)
    if num_top >= 0:
        yield "chosen_logprobs", float32, (num_rows, width)
        yield "top_ids", int32, (num_rows, width, num_top)
        yield "top_logprobs", float32, (num_rows, width, num_top)
    yield "bad", np.dtype(np.bool_), (num_rows,)
