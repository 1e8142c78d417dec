"""Results as bytes: everything comes back as it was, and damage is refused."""

from __future__ import annotations

import struct
import zlib
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.plan import StepResult
from runtime.result_codec import decode_result, encode_result


def result(num_rows: int, width: int, num_top: int, seed: int = 0) -> StepResult:
    """Random values; `num_top` -1: without logprobs."""
    random = np.random.default_rng(seed)
    logprobs = {}
    if num_top >= 0:
        logprobs = {
            "chosen_logprobs": random.random((num_rows, width), np.float32),
            "top_ids": random.integers(0, 1 << 31, (num_rows, width, num_top), np.int32),
            "top_logprobs": random.random((num_rows, width, num_top), np.float32),
        }
    return StepResult(
        step_id=int(random.integers(1 << 60)), counts=random.integers(0, width + 1, num_rows, np.int32),
        token_ids=random.integers(0, 1 << 31, (num_rows, width), np.int32), bad=random.random(num_rows) < 0.5,
        **logprobs,
    )


@given(st.integers(0, 9), st.integers(1, 17), st.integers(-1, 20), st.integers(0, 1000))
def test_round_trip(num_rows: int, width: int, num_top: int, seed: int) -> None:
    given_result = result(num_rows, width, num_top, seed)
    found = decode_result(encode_result(given_result))
    for field in fields(StepResult):
        before, after = getattr(given_result, field.name), getattr(found, field.name)
        if isinstance(before, np.ndarray):
            assert after.dtype == before.dtype
            assert after.shape == before.shape
            assert np.array_equal(after, before)
        else:
            assert after == before


def test_arrays_that_are_not_contiguous() -> None:
    whole = np.arange(12, dtype=np.int32).reshape(2, 6)
    given_result = StepResult(step_id=1, counts=whole[:, 0], token_ids=whole[:, ::2], bad=np.zeros(2, np.bool_))
    found = decode_result(memoryview(encode_result(given_result)))
    assert found.token_ids.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert found.counts.tolist() == [0, 6]


def test_any_change_of_a_byte_and_any_cut_is_refused() -> None:
    data = encode_result(result(2, 2, 1))
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= 0x10
        with pytest.raises(ValueError, match="result"):
            decode_result(bytes(damaged))
    for size in range(len(data)):
        with pytest.raises(ValueError, match="result"):
            decode_result(data[:size])
    with pytest.raises(ValueError, match="damaged"):
        decode_result(data + b"\0")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((-1, 2, -1), "-1 rows"),
        ((1, 0, -1), "of 0 tokens"),
        ((1, 2, -2), "-2 top logprobs"),
        ((9, 2, -1), "does not fit"),
        ((1, 2, -1), "4 bytes after the last array"),
    ],
)
def test_a_header_that_does_not_fit_its_body_is_refused(shape: tuple[int, int, int], message: str) -> None:
    """With a checksum that is right."""
    body = bytes(4 + 8 + 1 + 4)
    scalars = struct.pack("<4sHHqiii", b"LSRS", 1, 0, 5, *shape)
    with pytest.raises(ValueError, match=f"result 5.*{message}"):
        decode_result(scalars + struct.pack("<I", zlib.crc32(body, zlib.crc32(scalars))) + body)
