"""Prompts of `lockstep generate`: from the command line, a JSON-lines file or the configuration, with sampling fields.

A row of a file is an object with `prompt` and, at will, `id` and the fields of SAMPLING_FIELDS. Other fields (`kind`,
`source`, ...) describe the prompt and are ignored, unless they look like a misspelt or foreign sampling field.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt to continue, or why it cannot be."""

    id: str | int
    prompt: str | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def read_prompts(file: str, first_id: int = 0) -> list[PromptRow]:
    """Rows of a JSON-lines file (`-`: standard input); blank lines are skipped, a faulty row carries its error.

    A row without an id gets `first_id` plus its index.

    Raises FileNotFoundError or ValueError when the file itself cannot be read.
    """
    lines = _read_lines(file)
    filled = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    return [_row(str(i), n, line) for i, (n, line) in enumerate(filled, first_id)]


def _read_lines(file: str) -> list[str]:
    if file != "-" and not Path(file).exists():
        raise FileNotFoundError(f"{file}: no such prompts file")
    raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        return raw.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}") from None


def _row(default_id: str, line_number: int, line: str) -> PromptRow:
    where = f"line {line_number}"
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return PromptRow(id=default_id, prompt=None, error=f"{where}: not valid JSON: {error}")
    if not isinstance(values, dict):
        return PromptRow(id=default_id, prompt=None, error=f"{where}: expected an object, found {_kind(values)}")
    row_id = values.get("id")
    row_id = default_id if row_id is None else row_id
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        return PromptRow(id=default_id, prompt=None, error=f"{where}: id = {row_id!r}: expected a string or an integer")
    prompt = values.get("prompt")
    if not isinstance(prompt, str):
        found = f"prompt = {_short(prompt)}: expected a string" if "prompt" in values else "no prompt"
        return PromptRow(id=row_id, prompt=None, error=f"{where}: {found}")
    try:
        sampling = parse_sampling(values)
    except ValueError as error:
        return PromptRow(id=row_id, prompt=prompt, error=f"{where}: {error}")
    return PromptRow(id=row_id, prompt=prompt, sampling=sampling)


def parse_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of a row, checked for type; a null means not given. Raises ValueError naming the field."""
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name in ("id", "prompt"):
            continue
        if name not in SAMPLING_FIELDS:
            _refuse_near_miss(name)
        elif value is not None:
            expected, parse = SAMPLING_FIELDS[name]
            try:
                parsed[name] = parse(value)
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"{name} = {_short(value)}: expected {expected}") from None
    return parsed


def merge_sampling(layers: Sequence[Mapping[str, Any]]) -> SamplingParams:
    """Sampling parameters from the weakest layer to the strongest. Raises ValueError naming field and range."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    return SamplingParams(**merged)


def model_sampling(model: Path) -> dict[str, Any]:
    """Sampling defaults of generation_config.json: greedy unless it says `do_sample`. Raises ValueError."""
    path = model / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected an object, found {_kind(values)}")
    if not values.get("do_sample"):
        return {}
    given = {name: values[name] for name in ("temperature", "top_p", "top_k") if name in values}
    try:
        return {"temperature": 1.0} | parse_sampling(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _strings(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise TypeError
    return tuple(values)


def _integers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(_integer(v) for v in value)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise TypeError
    return {int(token): _number(bias) for token, bias in value.items()}


_INTEGER = ("an integer", _integer)
_NUMBER = ("a number", _number)
SAMPLING_FIELDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "max_tokens": _INTEGER,
    "min_tokens": _INTEGER,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _INTEGER,
    "min_p": _NUMBER,
    "seed": _INTEGER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "logit_bias": ("an object of token id to number", _bias),
    "stop": ("a string or a list of strings", _strings),
    "stop_token_ids": ("a list of integers", _integers),
    "ignore_eos": ("true or false", _boolean),
    "logprobs": _INTEGER,
    "draft_tokens": _INTEGER,
    "acceptance": ('"coupled" or "ratio"', _string),
}
_FOREIGN = {  # names other programs use; ignoring them would silently generate something else
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_strings": "stop",
    "random_seed": "seed",
}
_UNSUPPORTED = {"n", "best_of", "messages", "do_sample", "num_beams", "prompt_token_ids"}


def _refuse_near_miss(name: str) -> None:
    if name in _UNSUPPORTED:
        raise ValueError(f"field {name!r} is not supported")
    plain = name.replace("-", "_").lower()
    near = [_FOREIGN[plain]] if plain in _FOREIGN else difflib.get_close_matches(plain, SAMPLING_FIELDS, 1, cutoff=0.85)
    if near:
        raise ValueError(f"unknown field {name!r}: did you mean {near[0]!r}?")


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}.get(type(value), "a number")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
