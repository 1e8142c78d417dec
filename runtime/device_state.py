"""Slot-indexed tables on the device: what step N writes, step N + 1 gathers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from runtime.padding import DUMMY_SLOT
from runtime.plan import PlanArrays, StepPlan
from runtime.sampling_params import PARAM_DTYPE, EncodedParams
from runtime.sampling_tables import PenaltyTable, SamplingTable, uses_penalties

_UNWRITTEN = -1


class DeviceState:
    """Tables of fixed address and capacity; slot 0 and page 0 belong to dummies.

    `tokens` has one scratch column, for writes past the context limit. In debug mode unwritten and freed
    entries hold -1 and every gather asserts that it met none.
    """

    def __init__(
        self, *, num_slots: int, max_model_len: int, page_size: int, vocab_size: int,
        carried_shapes: Mapping[str, tuple[int, ...]], device: torch.device, debug: bool,
    ) -> None:
        self.device = device
        self.max_model_len = max_model_len
        self.page_size = page_size
        self._debug = debug
        fill = _UNWRITTEN if debug else 0
        self.tokens = torch.full((num_slots, max_model_len + 1), fill, dtype=torch.int32, device=device)
        self.committed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.limit = torch.zeros(num_slots, dtype=torch.int64, device=device)
        # The dummy has one token and is for ever at its limit: whatever it writes goes to page 0.
        self.tokens[DUMMY_SLOT] = 0
        self.committed[DUMMY_SLOT] = self.limit[DUMMY_SLOT] = 1
        self.page_table = torch.zeros(
            (num_slots, -(-max_model_len // page_size)), dtype=torch.int64, device=device
        )
        self.carried = {
            name: torch.zeros((num_slots, *shape), device=device) for name, shape in carried_shapes.items()
        }
        self.sampling = SamplingTable(num_slots, device)
        self.penalties = PenaltyTable(num_slots, vocab_size, device)

    def upload(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """The int32 arrays as int64 device tensors, in one transfer."""
        packed = torch.from_numpy(np.concatenate(arrays, dtype=np.int64, casting="safe"))
        if self.device.type != "cpu":
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        return tuple(torch.split(packed, [len(a) for a in arrays]))

    def apply(self, plan: StepPlan) -> None:
        """Enter what the plan says about slots: those freed, new requests in full, pages granted."""
        arrays = plan.arrays
        if len(arrays.freed_slots):
            self._free(arrays)
        if len(arrays.new_slots):
            self._admit(arrays)
        if len(arrays.pages):
            slots, index, pages = self.upload(arrays.page_slots, arrays.page_index, arrays.pages)
            self.page_table[slots, index] = pages

    def tokens_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Token ids [T] int64 at `positions` [T] of `slots` [T]; positions past the end read the scratch column."""
        token_ids = self.tokens[slots, positions.clamp(max=self.max_model_len)].long()
        if self._debug:
            assert bool((token_ids >= 0).all()), "a token was read before it was written"
        return token_ids

    def put_tokens(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Write token ids at positions of slots; those past the end go to the scratch column."""
        self.tokens[slots, positions.clamp(max=self.max_model_len)] = token_ids.int()

    def write_index(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Flat cache position of each token [T]; page 0 for positions at or past the request's limit."""
        page = self.page_table[slots, (positions.clamp(max=self.max_model_len - 1) // self.page_size)]
        page = torch.where(positions < self.limit[slots], page, 0)
        return page * self.page_size + positions % self.page_size

    def advance(self, slots: Tensor, counts: Tensor) -> None:
        """Add `counts` committed tokens, never past the limit."""
        self.committed[slots] = torch.minimum(self.committed[slots] + counts, self.limit[slots])

    def _free(self, arrays: PlanArrays) -> None:
        for slot in arrays.freed_slots.tolist():
            self.penalties.remove(slot)
        (slots,) = self.upload(arrays.freed_slots)
        self.page_table[slots] = 0
        self.committed[slots] = 0
        if self._debug:
            self.tokens[slots] = _UNWRITTEN
            for table in self.carried.values():
                table[slots] = float("nan")

    def _admit(self, arrays: PlanArrays) -> None:
        lengths = np.diff(arrays.new_cu_tokens)
        owners = np.repeat(arrays.new_slots, lengths)
        index = np.arange(len(owners), dtype=np.int32) - np.repeat(arrays.new_cu_tokens[:-1], lengths)
        owners_t, index_t, tokens, slots, limits, committed = self.upload(
            owners, index, arrays.new_tokens, arrays.new_slots, arrays.new_limits, lengths.astype(np.int32)
        )
        self.tokens[owners_t, index_t] = tokens.int()
        self.committed[slots] = committed
        self.limit[slots] = limits
        self.page_table[slots] = 0
        self._admit_sampling(arrays)

    def _admit_sampling(self, arrays: PlanArrays) -> None:
        rows = np.frombuffer(arrays.new_params.tobytes(), PARAM_DTYPE)
        params = EncodedParams(
            rows=rows, bias_ids=arrays.new_bias_ids.astype(np.int64), bias_values=arrays.new_bias_values,
            masked_ids=arrays.new_masked_ids.astype(np.int64),
        )
        self.sampling.write(arrays.new_slots.astype(np.int64), params)
        for i in np.flatnonzero(uses_penalties(rows)).tolist():
            tokens = arrays.new_tokens[arrays.new_cu_tokens[i] : arrays.new_cu_tokens[i + 1]]
            prompt_len = int(rows["prompt_len"][i])
            self.penalties.add(int(arrays.new_slots[i]), tokens[:prompt_len], tokens[prompt_len:])
