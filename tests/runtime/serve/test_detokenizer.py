"""Detokenisation: pieces add up to the whole decode, and stop strings cut exactly, however the text is tokenised."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from runtime.serve.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    DetokenizerFactory,
    OutputText,
    TokenBytes,
    WindowDetokenizer,
)

MINNOW = Tokenizer.from_file(str(Path(__file__).resolve().parents[3] / "configs" / "minnow" / "tokenizer.json"))
TABLE = TokenBytes(MINNOW)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
TOKEN_IDS = st.lists(st.integers(0, MINNOW.get_vocab_size() - 1), max_size=40)
BYTE_IDS = st.lists(st.integers(5, 260), max_size=24)  # the one-byte tokens: mostly invalid UTF-8
IDS = st.one_of(TOKEN_IDS, BYTE_IDS, TEXT.map(lambda text: MINNOW.encode(text).ids))


def byte_fallback_tokenizer() -> Tokenizer:
    """A Llama-style tokenizer: word-start marks, bytes as `<0xXX>`, the first space stripped."""
    tokens = ["<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "the", "▁ein", "é", "中", "▁▁", "."]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


FALLBACK = byte_fallback_tokenizer()


def pieces(detokenizer: Detokenizer, ids: Iterable[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def char_by_char(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule in its plainest form: read characters until some stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_every_token_alone_decodes_as_the_tokenizer_does() -> None:
    for token_id in range(MINNOW.get_vocab_size()):
        expected = MINNOW.decode([token_id], skip_special_tokens=True)
        assert "".join(pieces(ByteLevelDetokenizer(TABLE), [token_id])) == expected


@settings(max_examples=300, deadline=None)
@given(IDS)
def test_byte_level_pieces_add_up_to_the_whole_decode(ids: list[int]) -> None:
    assert "".join(pieces(ByteLevelDetokenizer(TABLE), ids)) == MINNOW.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(IDS)
def test_window_pieces_add_up_to_the_whole_decode(ids: list[int]) -> None:
    assert "".join(pieces(WindowDetokenizer(MINNOW), ids)) == MINNOW.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, FALLBACK.get_vocab_size() - 1) | st.integers(257, 264), max_size=30))
def test_window_pieces_add_up_with_byte_fallback(ids: list[int]) -> None:
    detokenizer = DetokenizerFactory(FALLBACK).new()
    assert isinstance(detokenizer, WindowDetokenizer)
    assert "".join(pieces(detokenizer, ids)) == FALLBACK.decode(ids, skip_special_tokens=True)


def test_a_character_split_over_tokens_appears_once_it_is_whole() -> None:
    ids = MINNOW.encode("中", add_special_tokens=False).ids
    assert len(ids) == 3
    for detokenizer in (ByteLevelDetokenizer(TABLE), WindowDetokenizer(MINNOW)):
        assert pieces(detokenizer, ids) == ["", "", "中", ""]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    ids = MINNOW.encode("a中", add_special_tokens=False).ids[:-1]
    for detokenizer in (ByteLevelDetokenizer(TABLE), WindowDetokenizer(MINNOW)):
        assert pieces(detokenizer, ids) == ["a", "", "", "\ufffd"]


def test_factory_takes_the_fast_path_for_byte_level_and_shares_its_table() -> None:
    factory = DetokenizerFactory(MINNOW)
    first, second = factory.new(), factory.new()
    assert isinstance(first, ByteLevelDetokenizer)
    assert isinstance(second, ByteLevelDetokenizer)
    assert first._table is second._table


def test_ids_outside_the_tokenizer_yield_nothing() -> None:
    for detokenizer in (ByteLevelDetokenizer(TABLE), WindowDetokenizer(MINNOW)):
        assert pieces(detokenizer, [1_000_000]) == ["", ""]


def new_output(stops: list[str], min_tokens: int = 0) -> OutputText:
    return OutputText(ByteLevelDetokenizer(TABLE), stops, min_tokens)


def run(output: OutputText, ids: Iterable[int]) -> tuple[list[str], str | None]:
    deltas = []
    for token_id in ids:
        delta, stop = output.push(token_id)
        deltas.append(delta)
        if stop is not None:
            return [*deltas, output.finish()], stop
    return [*deltas, output.finish()], None


ALPHABET = st.text("ab中é ", max_size=30)
STOPS = st.lists(st.text("ab中é ", min_size=1, max_size=5), max_size=4)


@st.composite
def tokenisations(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[int]]:
    """A text and ids of it, cut at random places so that merges vary."""
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return text, [i for part in parts for i in MINNOW.encode(part, add_special_tokens=False).ids]


@settings(max_examples=500, deadline=None)
@given(tokenisations(ALPHABET), STOPS)
def test_stop_strings_cut_as_if_read_character_by_character(case: tuple[str, list[int]], stops: list[str]) -> None:
    text, ids = case
    deltas, stop = run(new_output(stops), ids)
    assert ("".join(deltas), stop) == char_by_char(text, stops)


@settings(max_examples=200, deadline=None)
@given(tokenisations(TEXT), st.data())
def test_random_unicode_with_stops_taken_from_the_text(case: tuple[str, list[int]], data: st.DataObject) -> None:
    text, ids = case
    begin = data.draw(st.integers(0, len(text)))
    stops = [s for s in (text[begin : begin + 3], text[begin + 1 : begin + 6]) if s]
    deltas, stop = run(new_output(stops), ids)
    assert ("".join(deltas), stop) == char_by_char(text, stops)


@settings(max_examples=300, deadline=None)
@given(tokenisations(ALPHABET), STOPS)
def test_no_more_text_is_held_than_could_begin_a_stop_string(case: tuple[str, list[int]], stops: list[str]) -> None:
    _, ids = case
    output, reference, shown, seen = new_output(stops), ByteLevelDetokenizer(TABLE), "", ""
    for token_id in ids:
        delta, stop = output.push(token_id)
        shown += delta
        seen += reference.push(token_id)
        if stop is not None:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(s.startswith(held) for s in stops)
        assert not any(seen.endswith(s[:n]) for s in stops for n in range(len(held) + 1, len(s)))


def test_the_string_completed_first_wins_not_the_one_listed_or_begun_first() -> None:
    ids = MINNOW.encode("abcdef", add_special_tokens=False).ids
    deltas, stop = run(new_output(["abcde", "cd"]), ids)
    assert ("".join(deltas), stop) == ("ab", "cd")
    assert run(new_output(["d", "bcd"]), ids)[1] == "bcd"


def test_min_tokens_keeps_early_stop_strings_from_counting() -> None:
    ids = [MINNOW.encode(c, add_special_tokens=False).ids[0] for c in "xyxyz"]
    deltas, stop = run(new_output(["xy"], min_tokens=2), ids)
    assert ("".join(deltas), stop) == ("xy", "xy")
    deltas, stop = run(new_output(["xy"], min_tokens=4), ids)
    assert ("".join(deltas), stop) == ("xyxyz", None)


def test_finish_after_a_stop_string_is_empty_and_push_is_a_bug() -> None:
    output = new_output(["b"])
    ids = MINNOW.encode("b", add_special_tokens=False).ids
    assert output.push(ids[0]) == ("", "b")
    assert output.finish() == ""
    with pytest.raises(AssertionError, match="ended at a stop string"):
        output.push(ids[0])
