"""Messages between processes of a cluster: frozen dataclasses, made of what was received only if it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]

Message = TypeVar("Message")


def unpack(data: bytes, what: str) -> Any:
    """The msgpack value in `data`. Raises ValueError, which calls it `what`."""
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"{what} of {len(data)} bytes is damaged: {error}") from None


def checked_names(kind: type[Any], values: object) -> dict[str, Any]:
    """`values` as a map with the fields of `kind`, no more and no fewer. Raises ValueError."""
    names = {field.name for field in fields(kind)}
    if not isinstance(values, dict) or set(values) != names:
        raise ValueError(f"{kind.__name__} with {values!r:.200}: expected {sorted(names)}")
    return values


def made(kind: type[Message], values: object, fits: Mapping[str, Callable[[Any], bool]]) -> Message:
    """A message of `kind`. `fits`: what is allowed, by a field's annotation. Raises ValueError naming the field."""
    checked = checked_names(kind, values)
    for field in fields(kind):  # type: ignore[arg-type]
        if not fits[str(field.type)](checked[field.name]):
            raise ValueError(f"{kind.__name__}.{field.name} = {checked[field.name]!r:.200}: expected {field.type}")
    return kind(**checked)


def is_list_of(kind: type[Any], value: object) -> bool:
    """Whether it is a list, all of exactly this type."""
    return isinstance(value, list) and all(type(item) is kind for item in value)


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_map_of_text(value: object) -> bool:
    return isinstance(value, dict) and all(is_text(k) and is_text(v) for k, v in value.items())

