"""All ranks of an epoch connect to each other: a rank calls those below it, and answers those above."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import suppress

from parallel.abort import AbortSignal
from parallel.exchange_errors import PeerLost, PeersMissing
from parallel.socket_greeting import (
    ANSWER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    Self,
    hello,
    read_hello,
    refusal,
    reply_to_answer,
    same_proof,
    welcome,
)
from parallel.socket_link import tune
from parallel.socket_listener import ExchangeListener

Key = tuple[str, int]  # group, rank
MAX_EARLY = 1024


class Meeting:
    """One epoch's connections of one rank, by (group, rank of the layout). Used once."""

    def __init__(self, me: Self, listener: ExchangeListener, abort: AbortSignal) -> None:
        self._me, self._listener, self._abort = me, listener, abort
        self._selector = selectors.DefaultSelector()
        self._open: set[socket.socket] = set()
        self._met: dict[Key, socket.socket] = {}
        self._answers: set[Key] = set()
        self._refused = ""  # the last that was sent away, for whoever wonders why nobody comes

    def meet(
        self, calls: Mapping[Key, tuple[str, int]], answers: Collection[Key], timeout_s: float
    ) -> dict[Key, socket.socket]:
        """Connected sockets to all of `calls` (with their addresses) and `answers`. No socket is left when it raises.

        Raises PeersMissing, PeerLost, StaleEpoch, ExchangeRefused; Aborted.
        """
        self._answers = set(answers)
        deadline = time.monotonic() + timeout_s
        try:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            self._selector.register(self._abort, selectors.EVENT_READ, None)
            for (group, peer), address in calls.items():
                self._open_call(_Call(self._me, group, peer, address))
            self._take_early()
            while len(self._met) < len(calls) + len(answers):
                self._abort.raise_if_set()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeersMissing(self._missing(calls, timeout_s))
                for key, _ in self._selector.select(left):
                    self._turn(key)
            kept = set(self._met.values())
            return dict(self._met)
        except BaseException:
            kept = set()
            raise
        finally:
            self._selector.close()
            for sock in self._open - kept:
                sock.close()

    def _turn(self, key: selectors.SelectorKey) -> None:
        if isinstance(key.data, _Call | _Caller):
            self._advance(key.data)
        elif key.fileobj is self._listener:
            while (sock := self._listener.accept()) is not None:
                self._take(_Caller(sock))

    def _open_call(self, call: _Call) -> None:
        self._open.add(call.sock)
        self._selector.register(call.sock, selectors.EVENT_WRITE, call)

    def _take(self, caller: _Caller) -> None:
        self._open.add(caller.sock)
        self._selector.register(caller.sock, selectors.EVENT_READ, caller)

    def _take_early(self) -> None:
        """Those that were too early in the epoch before, unless they are late now."""
        early, self._listener.early = self._listener.early, []
        for said, sock in early:
            caller = _Caller(sock)
            self._take(caller)
            self._hear_hello(caller, said)

    def _advance(self, side: _Call | _Caller) -> None:
        if isinstance(side, _Call):
            if not side.connected:
                side.begin()
                self._selector.modify(side.sock, selectors.EVENT_READ, side)
            elif side.finish():
                self._selector.unregister(side.sock)
                self._met[side.group, side.peer] = side.sock
            return
        wanted = HELLO_BYTES if side.key is None else PROOF_BYTES
        data = _receive(side.sock, side.heard, wanted)
        if data is None:
            self._dismiss(side, "closed the connection")
        elif len(data) == wanted:
            side.heard = b""
            if side.key is None:
                self._hear_hello(side, data)
            elif same_proof(data, side.proof) and side.key not in self._met:
                self._selector.unregister(side.sock)
                self._met[side.key] = side.sock
            else:
                self._dismiss(side, f"rank {side.key[1]} does not have the secret")
        else:
            side.heard = data

    def _hear_hello(self, caller: _Caller, said: bytes) -> None:
        who = read_hello(said)
        if who is None:
            self._dismiss(caller, "somebody who is no rank")
            return
        if who.epoch > self._me.epoch and len(self._listener.early) < MAX_EARLY:
            self._selector.unregister(caller.sock)
            self._open.discard(caller.sock)
            self._listener.early.append((said, caller.sock))
            return
        key = (who.group, who.rank)
        answer = refusal(self._me, who, expected=key in self._answers and key not in self._met)
        if answer is not None:
            with suppress(OSError):
                caller.sock.send(answer)
            self._dismiss(caller, f"rank {who.rank} of epoch {who.epoch}, protocol {who.version}")
            return
        answer, caller.proof = welcome(self._me, said)
        caller.key = key
        with suppress(OSError):  # then reading says that it is gone
            caller.sock.send(answer)

    def _dismiss(self, caller: _Caller, why: str) -> None:
        self._refused = why
        self._selector.unregister(caller.sock)
        self._open.discard(caller.sock)
        caller.sock.close()

    def _missing(self, calls: Mapping[Key, tuple[str, int]], timeout_s: float) -> str:
        away = sorted({rank for _, rank in {*calls, *self._answers} - set(self._met)})
        hint = f"; refused: {self._refused}" if self._refused else ""
        return f"rank {self._me.rank}, epoch {self._me.epoch}: ranks {away} did not come within {timeout_s:g} s{hint}"


class _Caller:
    """A rank above, or somebody else, that has connected."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.heard, self.proof = b"", b""
        self.key: Key | None = None


class _Call:
    """The way to a rank below. Raises PeerLost where nobody listens any more."""

    def __init__(self, me: Self, group: str, peer: int, address: tuple[str, int]) -> None:
        self.group, self.peer, self.connected = group, peer, False
        self._me, self._heard, self._where = me, b"", f"{address[0]}:{address[1]}"
        self._said = hello(me, group)
        self.sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        try:
            tune(self.sock)
            self.sock.setblocking(False)
            self._check(self.sock.connect_ex(address))
        except OSError as error:  # no such host
            self.sock.close()
            raise PeerLost(f"rank {peer} cannot be reached at {self._where}: {error}") from None
        except PeerLost:
            self.sock.close()
            raise

    def begin(self) -> None:
        self._check(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        self.connected = True
        self._say(self._said)

    def finish(self) -> bool:
        """Whether the listener has answered, and well."""
        data = _receive(self.sock, self._heard, ANSWER_BYTES)
        if data is None:
            raise PeerLost(f"rank {self.peer} at {self._where} closed the connection")
        self._heard = data
        if len(data) < ANSWER_BYTES:
            return False
        self._say(reply_to_answer(self._me, self._said, data, self.peer, self._where))
        return True

    def _say(self, data: bytes) -> None:
        try:
            self.sock.send(data)
        except OSError as error:
            raise PeerLost(f"rank {self.peer} at {self._where} is lost: {error}") from None

    def _check(self, code: int) -> None:
        if code not in (0, errno.EINPROGRESS):
            raise PeerLost(f"rank {self.peer} cannot be reached at {self._where}: {os.strerror(code)}")


def _receive(sock: socket.socket, heard: bytes, wanted: int) -> bytes | None:
    """`heard` and what has come of the `wanted` bytes; None: the other end is gone."""
    try:
        data = sock.recv(wanted - len(heard))
    except BlockingIOError:
        return heard
    except OSError:
        return None
    return heard + data if data else None
