"""Token ids to text as they arrive: pieces that add up to the whole decode, cut exactly before a stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """Pieces returned by `push`, then `flush`, concatenate to `tokenizer.decode(all ids)` without special tokens."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TokenBytes:
    """Token id -> bytes of a byte-level tokenizer, looked up once; shared by all requests of a process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)
        self._bytes: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_CHAR_TO_BYTE[char] for char in token)
        except KeyError:  # an added token is spelled in plain text
            return token.encode()


class ByteLevelDetokenizer:
    """The fast path: tokens are bytes, so an incremental UTF-8 decoder is all it takes."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._table[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """The reference, for any decoder: decode a short window with and without the new ids and return the difference.

    Text is held while it ends in an incomplete character or, with byte fallback, in a byte token: such a decoder
    judges a run of byte tokens as a whole, so that a later byte can still spoil an earlier character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)
        self._context: list[int] = []  # ids that gave the last piece: they keep leading-space rules as in the whole
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        self._pending.append(token_id)
        if _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or ""):
            return ""
        text = self._decode(self._context + self._pending)
        return "" if text.endswith("\ufffd") else self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._context + self._pending)) if self._pending else ""

    def _advance(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        if piece:
            self._context, self._pending = self._pending, []
            self._context_text = self._decode(self._context)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class DetokenizerFactory:
    """Chooses the detokeniser for a tokenizer once; `new()` is one request's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = TokenBytes(tokenizer) if isinstance(tokenizer.decoder, decoders.ByteLevel) else None

    def new(self) -> Detokenizer:
        if self._table is not None:
            return ByteLevelDetokenizer(self._table)
        return WindowDetokenizer(self._tokenizer)


class OutputText:
    """One request's text: never retracts a character, never shows any part of a stop string.

    The stop string that counts is the one completed by the earliest character (the longest, if several end there),
    so the cut does not depend on how the text is split into tokens. Stop strings do not count in text that the
    first `min_tokens` tokens yield.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._max_held = max((len(s) for s in self._stop), default=1) - 1
        self._unstoppable = min_tokens if self._stop else 0
        self._held = ""
        self._stopped = False

    def push(self, token_id: int) -> tuple[str, str | None]:
        """New text of one token and, if it completes one, the stop string that ends the request."""
        assert not self._stopped, "the request ended at a stop string"
        piece = self._detokenizer.push(token_id)
        if not self._stop:
            return piece, None
        if self._unstoppable:
            self._unstoppable -= 1
            return piece, None
        return self._scan(self._held + piece) if piece else ("", None)

    def finish(self) -> str:
        """The text still held back, for a request that ended otherwise; empty after a stop string."""
        if self._stopped:
            return ""
        held, self._held = self._held, ""
        return held + self._detokenizer.flush()

    def _scan(self, text: str) -> tuple[str, str | None]:
        ends = [(begin + len(s), begin, s) for s in self._stop if (begin := text.find(s)) >= 0]
        if ends:
            _, begin, stop = min(ends)
            self._stopped = True
            return text[:begin], stop
        held = self._num_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._max_held, len(text)), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stop):
                return length
        return 0


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (Radford et al. 2019): Latin-1 where printable, U+0100.. elsewhere."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_CHAR_TO_BYTE = _byte_alphabet()
