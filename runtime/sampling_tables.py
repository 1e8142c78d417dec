"""Slot-indexed sampling state on the device: parameters, and penalty counts for the slots that use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp.accept import DrawKeys, Method
from runtime.sampling_params import NEUTRAL, EncodedParams

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTS = ("top_k", "min_tokens", "prompt_len", "max_drafts", "method", "seed", "choice")


@dataclass(frozen=True, kw_only=True)
class Uses:
    """The host's knowledge of what any row of a batch uses; what none uses is skipped."""

    penalties: bool
    bias: bool
    min_tokens: bool
    temperature: bool
    min_p: bool
    top_p: bool
    top_p_alone: bool  # a row has top-p and no top-k: its candidates are the whole vocabulary
    max_top_k: int  # largest top-k of the rows that have one, 0 when none has


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """What `process`, `draw` and `accept` need to know of R rows."""

    keys: DrawKeys
    temperature: Tensor  # [R] float32; 1 for greedy rows
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32
    repetition_penalty: Tensor  # [R] float32
    presence_penalty: Tensor  # [R] float32
    frequency_penalty: Tensor  # [R] float32
    top_k: Tensor  # [R] int64, 0: off
    min_tokens: Tensor  # [R] int64
    prompt_len: Tensor  # [R] int64
    max_drafts: Tensor  # [R] int64
    bias_ids: Tensor  # [R, B] int64, -1 where unused
    bias_values: Tensor  # [R, B] float32
    masked_ids: Tensor  # [R, M] int64, -1 where unused
    uses: Uses
    num_logprobs: int  # largest of the rows, -1: none wants any


class SamplingTable:
    """Parameters of every slot. Slot 0, and any slot never written, is greedy without options."""

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        self._host = np.repeat(NEUTRAL, num_slots)
        self._floats = torch.empty((num_slots, len(_FLOATS)), dtype=torch.float32, device=device)
        self._ints = torch.empty((num_slots, len(_INTS)), dtype=torch.int64, device=device)
        self._bias_ids = torch.full((num_slots, 0), -1, dtype=torch.int64, device=device)
        self._bias_values = torch.zeros((num_slots, 0), dtype=torch.float32, device=device)
        self._masked_ids = torch.full((num_slots, 0), -1, dtype=torch.int64, device=device)
        self._copy_in(torch.arange(num_slots, device=device), self._host)
        self._last: tuple[bytes, SamplingRows] | None = None  # a decode step mostly asks for the last one's slots

    def write(self, slots: NDArray[np.int64], params: EncodedParams) -> None:
        """Sets `slots` [n] to the n requests of `params`; what the slots held before is gone."""
        rows = params.rows
        self._last = None
        self._host[slots] = rows
        index = torch.from_numpy(slots).to(self._floats.device)
        self._copy_in(index, rows)
        self._bias_ids = _put(self._bias_ids, index, rows["num_bias"], params.bias_ids, -1)
        self._bias_values = _put(self._bias_values, index, rows["num_bias"], params.bias_values, 0.0)
        self._masked_ids = _put(self._masked_ids, index, rows["num_masked"], params.masked_ids, -1)

    def gather(self, slots: Tensor, host_slots: NDArray[np.integer]) -> SamplingRows:
        """Rows of `slots` [R] int64; `host_slots` is the same on the host, for what it can skip."""
        key = host_slots.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = key, self._gather(slots, host_slots)
        return self._last[1]

    def _gather(self, slots: Tensor, host_slots: NDArray[np.integer]) -> SamplingRows:
        floats = dict(zip(_FLOATS, self._floats[slots].unbind(1), strict=True))
        ints = dict(zip(_INTS, self._ints[slots].unbind(1), strict=True))
        host = self._host[host_slots]
        keys = DrawKeys(
            method=ints.pop("method"),
            seeds=ints.pop("seed"),
            choices=ints.pop("choice"),
            any_coupled=bool((host["method"] == Method.COUPLED).any()),
            any_ratio=bool((host["method"] == Method.RATIO).any()),
        )
        return SamplingRows(
            keys=keys,
            bias_ids=self._bias_ids[slots],
            bias_values=self._bias_values[slots],
            masked_ids=self._masked_ids[slots],
            uses=_uses(host),
            num_logprobs=int(host["num_logprobs"].max(initial=-1)),
            **floats,
            **ints,
        )

    def _copy_in(self, index: Tensor, rows: NDArray[Any]) -> None:
        floats = np.stack([rows[name] for name in _FLOATS], axis=1)
        ints = np.stack([rows[name].astype(np.int64) for name in _INTS], axis=1)
        self._floats[index] = torch.from_numpy(floats).to(self._floats.device)
        self._ints[index] = torch.from_numpy(ints).to(self._ints.device)


def _uses(host: NDArray[Any]) -> Uses:
    return Uses(
        penalties=bool(uses_penalties(host).any()),
        bias=bool((host["num_bias"] > 0).any()),
        min_tokens=bool((host["num_masked"] > 0).any()),
        temperature=bool((host["temperature"] != 1).any()),
        min_p=bool((host["min_p"] > 0).any()),
        top_p=bool((host["top_p"] < 1).any()),
        top_p_alone=bool(((host["top_p"] < 1) & (host["top_k"] == 0)).any()),
        max_top_k=int(host["top_k"].max(initial=0)),
    )


def uses_penalties(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of `rows` [n] PARAM_DTYPE need token counts, [n]."""
    neutral = (rows["repetition_penalty"] == 1) & (rows["presence_penalty"] == 0) & (rows["frequency_penalty"] == 0)
    result: NDArray[np.bool_] = ~neutral
    return result


def _put(table: Tensor, index: Tensor, counts: NDArray[np.int32], flat: NDArray[Any], fill: float) -> Tensor:
    """Writes ragged rows, `counts[i]` of the values in `flat` each, into a padded table, widened when they need it."""
    width = max(table.shape[1], int(counts.max(initial=0)))
    if width > table.shape[1]:
        wide = table.new_full((table.shape[0], width), fill)
        wide[:, : table.shape[1]] = table
        table = wide
    padded = np.full((len(counts), width), fill, dtype=flat.dtype)
    padded[np.arange(width) < counts[:, None]] = flat
    table[index] = torch.from_numpy(padded).to(table.device)
    return table


class PenaltyTable:
    """How often each token stands in a request's output, and whether in its prompt, for the slots that need it.

    The table is compact and grows: a vocabulary-sized row for each slot in use. Row 0 stays empty and stands for all
    other slots, so that every operation takes any slot.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._host_index = np.zeros(num_slots, dtype=np.int64)
        self._free: list[int] = []
        self._index = torch.zeros(num_slots, dtype=torch.int64, device=device)  # slot -> row
        self._counts = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((1, vocab_size), dtype=torch.bool, device=device)

    @property
    def num_slots_in_use(self) -> int:
        return int(np.count_nonzero(self._host_index))

    def add(self, slot: int, prompt: Sequence[int] | NDArray[Any], output: Sequence[int] | NDArray[Any] = ()) -> None:
        """Starts counting for `slot`; `output` is what a resumed request has committed beyond its prompt."""
        assert slot != 0, "slot 0 belongs to dummies"
        self.remove(slot)
        row = self._take_row()
        counts = np.bincount(np.asarray(output, dtype=np.int64), minlength=self._vocab_size).astype(np.int32)
        in_prompt = np.zeros(self._vocab_size, dtype=np.bool_)
        in_prompt[np.asarray(prompt, dtype=np.int64)] = True
        self._counts[row] = torch.from_numpy(counts).to(self._counts.device)
        self._in_prompt[row] = torch.from_numpy(in_prompt).to(self._in_prompt.device)
        self._host_index[slot] = row
        self._index[slot] = row

    def remove(self, slot: int) -> None:
        """Stops counting for `slot`; a slot that is not counted is left alone."""
        row = int(self._host_index[slot])
        if row:
            self._free.append(row)
            self._host_index[slot] = 0
            self._index[slot] = 0

    def commit(self, slots: Tensor, tokens: Tensor, num_new: Tensor) -> None:
        """Counts the first `num_new` [R] of `tokens` [R, Q] as output of `slots` [R]."""
        rows = self._index[slots]  # [R]
        new = torch.arange(tokens.shape[1], device=tokens.device) < num_new.unsqueeze(1)  # [R, Q]
        new &= (rows > 0).unsqueeze(1) & (tokens >= 0) & (tokens < self._vocab_size)
        cells = rows.unsqueeze(1) * self._vocab_size + tokens.clamp(0, self._vocab_size - 1)  # [R, Q]
        self._counts.view(-1).index_add_(0, cells.flatten(), new.flatten().to(torch.int32))

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Output counts [R, V] int32 and prompt presence [R, V] bool of `slots` [R], as copies."""
        rows = self._index[slots]
        return self._counts[rows], self._in_prompt[rows]

    def _take_row(self) -> int:
        if not self._free:
            old = self._counts.shape[0]
            self._free.extend(range(2 * old - 1, old - 1, -1))
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
            self._in_prompt = torch.cat([self._in_prompt, torch.zeros_like(self._in_prompt)])
        return self._free.pop()
