"""Reads a model folder's safetensors slice by slice, and names every tensor that is not as it should be."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FP8_BLOCK = 128
FP8_SCALE_SUFFIX = "_scale_inv"
_FLOAT_TYPES = {"F32", "F16", "BF16"}
_FP8_TYPE = "F8_E4M3"
_TYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"

Window = tuple[tuple[int, int], ...]  # begin and end along each dimension


class WeightSource:
    """The tensors of one checkpoint, single file or sharded, read straight into their final places, whole or in part.

    Every fault is a ValueError or FileNotFoundError with one line naming the tensor and the file.
    Use as a context manager: the files stay mapped until it exits.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._paths: dict[str, Path] = {}  # tensor name -> its file, for messages
        self._consumed: set[str] = set()
        self._touched: dict[tuple[str, Window], int] = {}  # bytes of each part that was read
        self._num_read = 0
        self.on_read: Callable[[int], None] | None = None  # told of the bytes read so far, from any thread
        try:
            for path, names in _shards(folder).items():
                self._open(path, names)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._files.clear()
        self._stack.close()

    def has(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    @property
    def bytes_read(self) -> int:
        """Bytes of the files that were needed so far: a part that is read again comes from memory, and counts once."""
        return sum(self._touched.values())

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of every tensor, from the headers."""
        for name in self._files:
            header = self._slice(name)
            yield name, math.prod(header.get_shape()) * _TYPE_BYTES.get(str(header.get_dtype()), 1)

    def bytes_by_tensor(self) -> dict[str, int]:
        """`bytes_read` of each tensor that any was read of."""
        count: Counter[str] = Counter()
        for (name, _), size in self._touched.items():
            count[name] += size
        return dict(count)

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        cols: slice | None = None,
        dtype: torch.dtype | None = torch.float32,
    ) -> Tensor:
        """A new tensor: `name` (whole shape `shape`), or its rows and columns. `dtype=None` keeps the stored type."""
        window = _window(shape, rows, cols)
        raw = self._read(name, shape, window)
        if raw.dtype == torch.float8_e4m3fn:
            out = self._dequantise(name, raw, shape, window)
        else:
            out = torch.empty(raw.shape, dtype=dtype or raw.dtype).copy_(raw)
        return self._checked(name, out)

    def take_into(
        self, dest: Tensor, name: str, shape: tuple[int, ...], *, rows: slice | None = None, cols: slice | None = None
    ) -> None:
        """Copy `name` (whole shape `shape`), or its rows and columns, into `dest` without a copy in between.

        dest: float32, of the shape of what is taken.
        """
        window = _window(shape, rows, cols)
        raw = self._read(name, shape, window)
        assert raw.shape == dest.shape, (name, raw.shape, dest.shape)
        if raw.dtype == torch.float8_e4m3fn:
            raw = self._dequantise(name, raw, shape, window)
        self._checked(name, dest.copy_(raw))

    def leave(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor that another rank reads, from its header alone: it must be here and of this shape."""
        kind = self._check_header(name, shape)
        if kind == _FP8_TYPE:
            self._check_header(self._scale_of(name), _num_blocks(shape))

    def is_copy(self, name: str, other: str, *, rows: slice | None = None) -> bool:
        """Whether both tensors hold the same values (in `rows`) in the same type; marks `name` consumed if so."""
        ours, theirs = self._slice(name), self._slice(other)
        shape = tuple(ours.get_shape())
        if ours.get_dtype() != theirs.get_dtype() or shape != tuple(theirs.get_shape()):
            return False
        window = _window(shape, rows, None)
        same = bool(torch.equal(_as_integers(self._part(name, window)), _as_integers(self._part(other, window))))
        if same:
            self._consumed.add(name)
        return same

    def ignore(self, names: Iterable[str]) -> None:
        """Mark tensors that are known and not needed."""
        self._consumed.update(names)

    def check_consumed(self) -> None:
        """Raises ValueError naming tensors that nothing asked for."""
        left = sorted(self._files.keys() - self._consumed)
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ValueError(f"unexpected tensors in {self._paths[left[0]]}: {', '.join(left[:3])}{more}")

    def _open(self, path: Path, names: list[str] | None) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
        present = set(file.keys())
        for name in names if names is not None else present:
            if name not in present:
                raise ValueError(f"{path.parent / _INDEX_FILE} places tensor {name} in {path.name}, which lacks it")
        for name in present:
            if name in self._files:
                raise ValueError(f"tensor {name} is in both {self._paths[name]} and {path}")
            self._files[name], self._paths[name] = file, path

    def _slice(self, name: str) -> Any:
        file = self._files.get(name)
        if file is None:
            raise ValueError(f"tensor {name} is missing from {self.folder}")
        return file.get_slice(name)

    def _check_header(self, name: str, shape: tuple[int, ...]) -> str:
        """The stored type of `name`, which now counts as consumed."""
        header = self._slice(name)
        found, kind = tuple(header.get_shape()), str(header.get_dtype())
        if found != shape:
            raise ValueError(f"tensor {name} in {self._paths[name]} has shape {list(found)}, expected {list(shape)}")
        if kind not in _FLOAT_TYPES and kind != _FP8_TYPE:
            raise ValueError(
                f"tensor {name} in {self._paths[name]} has dtype {kind}, expected one of F32, F16, BF16, {_FP8_TYPE}"
            )
        self._consumed.add(name)
        return kind

    def _read(self, name: str, shape: tuple[int, ...], window: Window) -> Tensor:
        self._check_header(name, shape)
        return self._part(name, window)

    def _part(self, name: str, window: Window) -> Tensor:
        """A view of the mapped file where it can be one: only what is used of it is read."""
        part = self._slice(name)
        if window == tuple((0, size) for size in part.get_shape()):
            raw: Tensor = self._files[name].get_tensor(name)
        else:
            raw = part[tuple(slice(begin, end) for begin, end in window)]
        if (name, window) not in self._touched:
            size = raw.numel() * raw.element_size()
            self._touched[name, window] = size
            self._num_read += size
            if self.on_read is not None:
                self.on_read(self._num_read)
        return raw

    def _scale_of(self, name: str) -> str:
        scale_name = name + FP8_SCALE_SUFFIX
        if not self.has(scale_name):
            raise ValueError(f"tensor {name} in {self._paths[name]} is float8 but {scale_name} is missing")
        return scale_name

    def _dequantise(self, name: str, raw: Tensor, shape: tuple[int, ...], window: Window) -> Tensor:
        """float8 values times the scale of their 128 x 128 block."""
        blocks = [range(begin // FP8_BLOCK, -(-end // FP8_BLOCK)) for begin, end in window]
        rows, cols = (slice(part.start, part.stop) for part in blocks)
        scale = self.take(self._scale_of(name), _num_blocks(shape), rows=rows, cols=cols)
        row_block, col_block = (torch.arange(begin, end) // FP8_BLOCK - begin // FP8_BLOCK for begin, end in window)
        return raw.to(torch.float32).mul_(scale[row_block[:, None], col_block])

    def _checked(self, name: str, values: Tensor) -> Tensor:
        # One pass over the values; the sum is not finite when any value is not.
        if values.numel() and not torch.isfinite(values.sum(dtype=torch.float32)):
            num_bad = int((~torch.isfinite(values)).sum())
            if num_bad:
                raise ValueError(f"tensor {name} in {self._paths[name]} has {num_bad} values that are not finite")
        return values


def _window(shape: tuple[int, ...], rows: slice | None, cols: slice | None) -> Window:
    return tuple((part or slice(None)).indices(size)[:2] for size, part in zip(shape, (rows, cols), strict=False))


def _num_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // FP8_BLOCK) for size in shape)


def _as_integers(values: Tensor) -> Tensor:
    """The bytes of `values`, eight at a time where they divide."""
    flat = values.reshape(-1).view(torch.uint8)
    return flat.view(torch.int64) if flat.numel() % 8 == 0 else flat


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """File -> the tensors the index places in it; None stands for "all"."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no such model folder: {folder}")
    index = folder / _INDEX_FILE
    single = folder / _SINGLE_FILE
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise FileNotFoundError(f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}")
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        shards: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            names = shards.setdefault(folder / file, [])
            assert names is not None
            names.append(name)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is not a safetensors index (an object with a weight_map)") from None
    return shards
