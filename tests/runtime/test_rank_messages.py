"""Messages between controller and ranks: they come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import msgpack  # type: ignore[import-untyped]
import pytest

from runtime.rank_messages import (
    CONTROL,
    PLANS,
    RESULT,
    Control,
    Failure,
    Ready,
    Start,
    Stop,
    decode_control,
    encode_control,
    frame_plans,
    frame_result,
    kind_of,
    plans_of,
    result_of,
)


@pytest.mark.parametrize(
    "message",
    [
        Ready(facts={"num_pages": 12, "bytes_read": 1 << 40}),
        Start(max_model_len=2048, num_pages=100),
        Stop(),
        Failure(error="größer", phase="target: all_to_all on ep", step_id=-1, time_ns=1 << 62, cause="communication"),
    ],
)
def test_control_messages_round_trip(message: Control) -> None:
    data = encode_control(message)
    assert kind_of(data) == CONTROL
    assert decode_control(data) == message


def test_plans_and_results_keep_their_bytes_and_alignment() -> None:
    data = frame_plans(7, b"12345678plan")
    assert (kind_of(data), data.index(b"1234") % 8) == (PLANS, 0)
    step_id, plans = plans_of(data)
    assert (step_id, bytes(plans)) == (7, b"12345678plan")
    data = frame_result(b"12345678")
    assert (kind_of(data), bytes(result_of(data))) == (RESULT, b"12345678")
    assert data.index(b"1234") % 8 == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "begins with b''"),
        (frame_plans(1, b""), "begins with b'LSPLANS"),
        (CONTROL, "damaged"),
        (CONTROL + b"\xc1", "damaged"),
        (CONTROL + msgpack.packb(3), "unknown control message: 3"),
        (CONTROL + msgpack.packb({"type": "stop", "extra": 1}), "unknown control message"),
        (CONTROL + msgpack.packb({"type": "sing"}), "unknown control message"),
        (CONTROL + msgpack.packb({"type": ["start"]}), "unknown control message"),
    ],
)
def test_anything_else_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_control(data)


@pytest.mark.parametrize("data", [b"", PLANS, encode_control(Stop())])
def test_no_plans_are_found_in_other_messages(data: bytes) -> None:
    with pytest.raises(ValueError, match="expected b'LSPLANS"):
        plans_of(data)
