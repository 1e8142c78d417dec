"""Messages of relays: what is encoded is decoded, and noise is refused as a ValueError and nothing else."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cluster.relay_messages import (
    GrantRefusal,
    GrantReply,
    GrantRequest,
    GroupSegment,
    OpenEpoch,
    RelayHello,
    Trouble,
    decode,
    encode,
    frame_result,
    result_of,
)

MESSAGES = [
    RelayHello(node_rank=1, host="node-1", pid=12),
    OpenEpoch(
        ranks=[0, 3], plan_bytes=1 << 20, result_bytes=4096, slot_bytes=64,
        segments=[GroupSegment(name="tp", ranks=[0, 3], num_bytes=1 << 33)],
    ),
    Trouble(rank=-1, error="ReaderDead", text="ring 'plans': ..."),
    GrantRequest(epoch=4, rank=2),
    GrantReply(epoch=4, index=1, slot_bytes=64, segments=["tp", "ep"]),
    GrantRefusal(epoch=4, is_stale=True, text="over"),
]
KINDS = [type(message) for message in MESSAGES]

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5)
values = plain | st.lists(plain, max_size=3) | st.dictionaries(st.text(max_size=5), plain, max_size=2)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Any) -> None:
    assert decode(type(message), encode(message)) == message
    for kind in set(KINDS) - {type(message)}:
        with pytest.raises(ValueError, match=kind.__name__):
            decode(kind, encode(message))


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(KINDS), data=st.binary(max_size=60))
def test_noise(kind: type[Any], data: bytes) -> None:
    with pytest.raises(ValueError, match=kind.__name__):
        decode(kind, data)


@settings(max_examples=100, deadline=None)
@given(message=st.sampled_from(MESSAGES), data=st.data())
def test_fields_of_other_types(message: Any, data: st.DataObject) -> None:
    """Whatever stands in a field, the message is refused or holds what its types say."""
    content = msgpack.unpackb(encode(message))
    name = data.draw(st.sampled_from(sorted(content)))
    content[name] = data.draw(values)
    try:
        decoded = decode(type(message), msgpack.packb(content))
    except ValueError:
        return
    assert type(getattr(decoded, name)) is type(getattr(message, name))
    assert encode(decoded) == msgpack.packb(content)


def test_results_carry_their_rank() -> None:
    assert result_of(frame_result(70_000, b"data")) == (70_000, b"data")
    with pytest.raises(ValueError, match="a result of 3 bytes"):
        result_of(b"abc")
