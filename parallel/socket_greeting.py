"""What two ranks say when one connects to the other: who they are, in which epoch, and that both have the secret.

The caller sends a hello, the listener answers with its proof, the caller sends its own. Proofs are HMAC-SHA256 over all
that was said, so that neither a listener nor a recorded conversation can stand for a rank.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass

from parallel.exchange_errors import ExchangeRefused, StaleEpoch

VERSION = 1
PROOF_BYTES = 32
_HELLO = struct.Struct("<4sH8sQI32s")  # magic, version, group, epoch, rank, nonce
_ANSWER = struct.Struct("<4sHHQI32s32s")  # magic, version, verdict, epoch, rank, nonce, proof
HELLO_BYTES, ANSWER_BYTES = _HELLO.size, _ANSWER.size
_MAGIC = b"LKXC"
_WELCOME, _STALE, _VERSION, _UNEXPECTED = range(4)



@dataclass(frozen=True, kw_only=True)
class Self:
    """What this rank knows of itself."""

    rank: int
    epoch: int
    secret: bytes


@dataclass(frozen=True)
class Hello:
    """Who calls."""

    group: str
    rank: int
    epoch: int
    version: int
    nonce: bytes


def hello(me: Self, group: str) -> bytes:
    """The first message of a caller."""
    return _HELLO.pack(_MAGIC, VERSION, group.encode(), me.epoch, me.rank, os.urandom(32))


def read_hello(data: bytes) -> Hello | None:
    """None: whoever this is, it is no rank."""
    magic, version, group, epoch, rank, nonce = _HELLO.unpack(data)
    if magic != _MAGIC:
        return None
    return Hello(group.rstrip(b"\0").decode(errors="replace"), rank, epoch, version, nonce)


def refusal(me: Self, caller: Hello, *, expected: bool) -> bytes | None:
    """What to tell a caller that cannot stay; None: it can."""
    verdict = _VERSION if caller.version != VERSION else _STALE if caller.epoch < me.epoch else _UNEXPECTED
    if verdict == _UNEXPECTED and expected:
        return None
    return _ANSWER.pack(_MAGIC, VERSION, verdict, me.epoch, me.rank, b"", b"")


def welcome(me: Self, said: bytes) -> tuple[bytes, bytes]:
    """The answer to the hello `said`, and the proof that the caller must then give."""
    nonce = os.urandom(32)
    proof = _proof(me.secret, b"listener", said, me.rank, nonce)
    answer = _ANSWER.pack(_MAGIC, VERSION, _WELCOME, me.epoch, me.rank, nonce, proof)
    return answer, _proof(me.secret, b"caller", said, me.rank, nonce)


def same_proof(given: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)


def reply_to_answer(me: Self, said: bytes, answer: bytes, peer: int, where: str) -> bytes:
    """The caller's proof, once the listener's holds. Raises StaleEpoch or ExchangeRefused naming rank `peer`."""
    magic, version, verdict, epoch, rank, nonce, proof = _ANSWER.unpack(answer)
    if magic != _MAGIC:
        raise ExchangeRefused(f"rank {peer} at {where}: something else listens there")
    if verdict == _VERSION:
        raise ExchangeRefused(f"rank {peer} at {where}: protocol version {version}, rank {me.rank} has {VERSION}")
    if verdict == _STALE:
        raise StaleEpoch(f"rank {peer} at {where} is in epoch {epoch}, rank {me.rank} in {me.epoch}")
    if verdict != _WELCOME or rank != peer:
        raise ExchangeRefused(f"rank {peer} at {where}: rank {rank} answers, and does not expect rank {me.rank}")
    if not same_proof(proof, _proof(me.secret, b"listener", said, peer, nonce)):
        raise ExchangeRefused(f"rank {peer} at {where} does not have the secret of rank {me.rank}")
    return _proof(me.secret, b"caller", said, peer, nonce)


def _proof(secret: bytes, role: bytes, said: bytes, listener: int, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"lockstep exchange " + role + said + struct.pack("<I", listener) + nonce, "sha256")
