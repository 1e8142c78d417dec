"""Messages of keepers survive the way, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from runtime.cluster import keeper_messages as messages
from runtime.cluster.keeper_messages import (
    Abort,
    End,
    Hello,
    Join,
    Ping,
    RankEnded,
    RankJoin,
    RankStanding,
    Standing,
    encode,
)

HELLO = Hello(
    rank=1, world_size=2, local_rank=0, local_world_size=1, node_rank=1, num_nodes=2, source="torchrun", host="b",
    pid=7, facts={"version torch": "2.13.0"},
)
JOIN = Join(epoch=3, serial=2, hosts=["a", "b"], ports=[1, 2], nodes=[0, 1])
RANK_JOIN = RankJoin(
    epoch=3, hosts=["a"], ports=[1], nodes=[0], plans_index=0, vitals_index=0, segments=["tp", "ep"], slot_bytes=64
)


@pytest.mark.parametrize(
    ("message", "decode"),
    [
        (HELLO, messages.decode_hello),
        (Standing(serial=1, left=0, host="a", port=5), messages.decode_from_keeper),
        (RankEnded(serial=1, code=-9, text=""), messages.decode_from_keeper),
        (JOIN, messages.decode_to_keeper),
        (Abort(epoch=3, leave_s=0.5), messages.decode_to_keeper),
        (Abort(epoch=3, leave_s=1), messages.decode_to_keeper),  # msgpack has integers of its own
        (End(code=69, text="x"), messages.decode_to_keeper),
        (Ping(), messages.decode_from_keeper),
        (Ping(), messages.decode_to_keeper),
        (RankStanding(left=2, port=9), messages.decode_from_rank),
        (RANK_JOIN, messages.decode_to_rank),
    ],
)
def test_what_was_sent_arrives(message: object, decode: Callable[[bytes], object]) -> None:
    assert decode(encode(message)) == message


def test_a_message_that_only_the_other_side_sends_is_refused() -> None:
    with pytest.raises(ValueError, match="message of type 'Join': expected one of Standing, RankEnded"):
        messages.decode_from_keeper(encode(JOIN))
    with pytest.raises(ValueError, match="message of type 'Standing': expected one of Join, Abort"):
        messages.decode_to_keeper(encode(Standing(serial=1, left=0, host="a", port=5)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rank": "1"}, "Hello.rank = '1': expected int"),
        ({"rank": True}, "Hello.rank = True: expected int"),
        ({"host": 3}, "Hello.host = 3: expected str"),
        ({"facts": {"a": 1}}, r"Hello.facts = {'a': 1}: expected Mapping\[str, str\]"),
        ({"more": 1}, "Hello with .*'more'.*: expected"),
        ({"type": "Nothing"}, "message of type 'Nothing': expected one of Hello"),
        ({"type": 4}, "message of type 4"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], told: str) -> None:
    values = msgpack.unpackb(encode(HELLO))
    with pytest.raises(ValueError, match=told):
        messages.decode_hello(msgpack.packb({**values, **change}))


def test_a_missing_field_is_refused() -> None:
    values = msgpack.unpackb(encode(HELLO))
    del values["pid"]
    with pytest.raises(ValueError, match="Hello with"):
        messages.decode_hello(msgpack.packb(values))


@pytest.mark.parametrize("item", ["a", True, 1.5, None])
def test_every_item_of_a_list_is_looked_at(item: object) -> None:
    values = {**msgpack.unpackb(encode(JOIN)), "ports": [1, item]}
    with pytest.raises(ValueError, match="Join.ports = "):
        messages.decode_to_keeper(msgpack.packb(values))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01", encode(JOIN)[:-1], encode(JOIN) + b"x", b"\x01"])
def test_damage_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"is damaged|message of type None"):
        messages.decode_to_keeper(data)
