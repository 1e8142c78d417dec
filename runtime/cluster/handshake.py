"""How two ends of a new connection prove to each other that they know the shared secret, before anything else is read.

    client: greeting, protocol version, role, its nonce
    server: its nonce, HMAC-SHA256 of "server" and all of that          or a refusal in words
    client: HMAC-SHA256 of "client" and all of that                     or a refusal in words
    server: accepted                                                    or a refusal in words

The side's name goes into its proof, so that no proof can be sent back as the other's; nonces make each one new. Every
message has a fixed size. It proves who connects; what follows is checked for damage, not hidden or signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import socket
import struct
import time

from runtime.cluster.line_errors import AuthenticationFailed, LineClosed, LineTimeout, VersionRefused

PROTOCOL_VERSION = 1
GREETING = b"LOCKSTEP"
ROLE_BYTES, NONCE_BYTES, PROOF_BYTES, TEXT_BYTES = 16, 32, 32, 128

_HELLO = struct.Struct(f"<8sI{ROLE_BYTES}s{NONCE_BYTES}s")
_ANSWER = struct.Struct(f"<4s{TEXT_BYTES}s")  # tag, then what goes with it, filled with zeros
_PROOF, _ACCEPTED, _REFUSED, _OTHER_VERSION = b"PROF", b"OKAY", b"REFU", b"VERS"
_ROLE = re.compile(r"[a-z][a-z0-9-]*")


def offer_handshake(sock: socket.socket, secret: bytes, role: str, peer: str, deadline: float) -> None:
    """The connecting side, on a blocking socket; `deadline` is on the monotonic clock.

    Raises AuthenticationFailed, VersionRefused, LineTimeout, LineClosed.
    """
    name = role.encode("ascii")
    if not _ROLE.fullmatch(role) or len(name) > ROLE_BYTES:
        raise ValueError(f"role {role!r}: expected 1..{ROLE_BYTES} lower-case letters, digits and dashes")
    hello = _HELLO.pack(GREETING, PROTOCOL_VERSION, name, os.urandom(NONCE_BYTES))
    _send(sock, hello, peer, deadline)
    content = _answer(sock, _PROOF, peer, deadline)
    nonce, proof = content[:NONCE_BYTES], content[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES]
    if not hmac.compare_digest(proof, _prove(secret, b"server", hello, nonce)):
        _refuse(sock, _REFUSED, "the controller has another secret", deadline)
        raise AuthenticationFailed(f"{peer} does not know our secret: set the same LOCKSTEP_SECRET on both sides")
    _send(sock, _ANSWER.pack(_PROOF, _prove(secret, b"client", hello, nonce)), peer, deadline)
    _answer(sock, _ACCEPTED, peer, deadline)


def accept_handshake(sock: socket.socket, secret: bytes, peer: str, deadline: float) -> str:
    """The accepting side; the role that the peer has named. Raises like `offer_handshake`."""
    hello = _receive(sock, _HELLO.size, peer, deadline)
    greeting, version, name, _ = _HELLO.unpack(hello)
    if greeting != GREETING:
        raise AuthenticationFailed(f"{peer} is no part of Lockstep: it begins with {greeting!r}")
    if version != PROTOCOL_VERSION:
        text = f"the controller speaks protocol version {PROTOCOL_VERSION}, this process {version}"
        _refuse(sock, _OTHER_VERSION, text, deadline)
        raise VersionRefused(f"{peer} speaks protocol version {version}, expected {PROTOCOL_VERSION}")
    role = str(name.rstrip(b"\0"), "ascii", "replace")
    if not _ROLE.fullmatch(role):
        raise AuthenticationFailed(f"{peer} names the role {role!r}")
    nonce = os.urandom(NONCE_BYTES)
    _send(sock, _ANSWER.pack(_PROOF, nonce + _prove(secret, b"server", hello, nonce)), peer, deadline)
    proof = _answer(sock, _PROOF, f"{role} at {peer}", deadline)[:PROOF_BYTES]
    if not hmac.compare_digest(proof, _prove(secret, b"client", hello, nonce)):
        _refuse(sock, _REFUSED, "the proof is wrong: other secret", deadline)
        raise AuthenticationFailed(f"{role} at {peer} does not know our secret")
    _send(sock, _ANSWER.pack(_ACCEPTED, b""), peer, deadline)
    return role


def _prove(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    key = hashlib.sha256(secret).digest()  # HMAC itself takes a key and the same with zeros behind it for one
    return hmac.new(key, side + hello + nonce, hashlib.sha256).digest()


def _answer(sock: socket.socket, expected: bytes, peer: str, deadline: float) -> bytes:
    """What goes with an answer of the expected kind; a refusal is raised."""
    tag, content = _ANSWER.unpack(_receive(sock, _ANSWER.size, peer, deadline))
    if tag == expected:
        return bytes(content)
    text = content.rstrip(b"\0").decode("utf-8", "replace")
    if tag == _OTHER_VERSION:
        raise VersionRefused(f"{peer} refuses: {text!r}")
    if tag == _REFUSED:
        raise AuthenticationFailed(f"{peer} refuses: {text!r}")
    raise AuthenticationFailed(f"{peer} is no part of Lockstep: it answers {tag!r}, expected {expected!r}")


def _refuse(sock: socket.socket, tag: bytes, text: str, deadline: float) -> None:
    """Say why, if the peer still listens: what is raised here afterwards says the same."""
    try:
        _send(sock, _ANSWER.pack(tag, text.encode()[:TEXT_BYTES]), "", deadline)
    except (LineClosed, LineTimeout):
        return


def _send(sock: socket.socket, data: bytes, peer: str, deadline: float) -> None:
    try:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.sendall(data)
    except TimeoutError:
        raise LineTimeout(f"{peer} does not take the handshake") from None
    except OSError as error:
        raise LineClosed(f"{peer} has closed the connection during the handshake: {error.strerror}") from None


def _receive(sock: socket.socket, size: int, peer: str, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise LineTimeout(f"{peer} has sent {len(data)} of {size} bytes of the handshake in time")
        try:
            sock.settimeout(left)
            piece = sock.recv(size - len(data))
        except TimeoutError:
            continue
        except OSError as error:
            raise LineClosed(f"{peer} has closed the connection during the handshake: {error.strerror}") from None
        if not piece:
            raise LineClosed(f"{peer} has closed the connection during the handshake")
        data += piece
    return data
