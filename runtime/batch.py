"""Rows of a plan -> device tensors. Slots and row lengths are the plan's, positions of verify rows the device's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.attention.meta import AttentionMeta, DecodeGroup, PrefillRow
from runtime.device_state import DeviceState
from runtime.padding import DUMMY_SLOT
from runtime.plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's rows on the device: D verify rows of 1 + k tokens, then the tokens of the prefill rows.

    `metas` describe the step's one pass, or its two halves, whose tokens follow one another.
    """

    num_verify: int
    q_len: int
    verify_slots: Tensor  # [D] int64
    first_position: Tensor  # [D] int64: committed length, the position of draft 1
    token_slots: Tensor  # [T] int64
    positions: Tensor  # [T] int64, not clamped
    metas: tuple[AttentionMeta, ...]
    sample_slots: Tensor  # [S] int64, prefill rows that yield a token
    sample_index: Tensor  # [S] int64, their last token in the pass
    carry_slots: Tensor  # [C] int64, prefill rows after which the drafter's state is complete
    carry_index: Tensor  # [C] int64


@dataclass(frozen=True, kw_only=True)
class _HostRows:
    """Index arrays that follow from the plan alone."""

    token_slots: np.ndarray  # [T - D * q_len]
    positions: np.ndarray
    ends: np.ndarray  # [P] end of each prefill row in the pass


@dataclass(frozen=True, slots=True)
class _Part:
    """A half: verify rows `first_row .. last_row - 1` and the prefill tokens among tokens `begin .. end - 1`."""

    first_row: int
    last_row: int
    begin: int
    end: int


def build_batch(plan: StepPlan, state: DeviceState) -> Batch:
    """Lay out the rows of `plan`; D * (1 + k) verify tokens come first. No value is read back from the device."""
    arrays, num_verify, q_len = plan.arrays, plan.num_verify, 1 + plan.k
    host = _prefill_tokens(plan)
    first = slice(num_verify, None)
    samples, carries = arrays.samples[first] != 0, arrays.carries[first] != 0
    slots = arrays.slots[first]
    verify_slots, prefill_slots, prefill_positions, sample_slots, sample_index, carry_slots, carry_index = state.upload(
        arrays.slots[:num_verify], host.token_slots, host.positions, slots[samples], host.ends[samples] - 1,
        slots[carries], host.ends[carries] - 1,
    )
    first_position = state.committed[verify_slots]  # [D]
    verify_positions = (first_position - 1).unsqueeze(1) + torch.arange(q_len, device=state.device)  # [D, q_len]
    # expand, not repeat_interleave, which takes 0.3 ms for two entries on the CPU
    token_slots = verify_slots.unsqueeze(1).expand(-1, q_len).reshape(-1)
    positions = verify_positions.view(-1)
    if len(host.positions):
        token_slots = torch.cat((token_slots, prefill_slots))
        positions = torch.cat((positions, prefill_positions))
    clamped = positions.clamp(max=state.max_model_len - 1)
    write_index = state.write_index(token_slots, positions)
    dummy = token_slots == DUMMY_SLOT if _has_dummy(plan) else None
    metas = []
    for i, part in enumerate(_parts(plan, len(host.positions))):
        tokens = slice(part.begin, part.end)
        rows = slice(part.first_row, part.last_row)
        metas.append(
            AttentionMeta(
                num_tokens=part.end - part.begin, positions=clamped[tokens], write_index=write_index[tokens],
                decode=_decode_rows(plan, state, verify_slots, verify_positions, rows),
                prefill=_prefill_rows(plan, state, host, part), dummy=None if dummy is None else dummy[tokens],
                capacity=plan.capacities[i] if plan.capacities else None,
            )
        )
    return Batch(
        num_verify=num_verify, q_len=q_len, verify_slots=verify_slots, first_position=first_position,
        token_slots=token_slots, positions=positions, metas=tuple(metas), sample_slots=sample_slots,
        sample_index=sample_index, carry_slots=carry_slots, carry_index=carry_index,
    )


def draft_metas(state: DeviceState, batch: Batch, plan: StepPlan, i: int) -> tuple[AttentionMeta]:
    """The single-token pass that yields the logits of draft i >= 1 (0-based): position committed - 2 + i."""
    positions = batch.first_position + (i - 2)  # [D]
    bound = int(plan.arrays.kv_bounds[: plan.num_verify].max())
    return (
        AttentionMeta(
            num_tokens=batch.num_verify,
            positions=positions.clamp(max=state.max_model_len - 1),
            write_index=state.write_index(batch.verify_slots, positions),
            decode=decode_group(state, batch.verify_slots, positions.unsqueeze(1), bound),
            prefill=(),
            dummy=batch.verify_slots == DUMMY_SLOT if _has_dummy(plan) else None,
            capacity=plan.capacities[-1] if plan.capacities else None,
        ),
    )


def decode_group(state: DeviceState, slots: Tensor, positions: Tensor, bound: int) -> DecodeGroup:
    """Rows of equal length at `positions` [D, q_len]; `bound` is the host's upper bound of positions attended to."""
    num_pages = -(-bound // state.page_size)
    kv_positions = torch.arange(num_pages * state.page_size, device=state.device)
    hidden = kv_positions > positions.unsqueeze(2)  # [D, q_len, num_pages * page_size]
    mask = torch.zeros(hidden.shape, device=state.device).masked_fill_(hidden, float("-inf"))
    return DecodeGroup(
        num_rows=len(slots), q_len=positions.shape[1],
        page_table=state.page_table[:, :num_pages].index_select(0, slots), mask=mask,
    )


def split_rows(plan: StepPlan) -> tuple[int, int]:
    """Where a split step is cut: (verify rows, prefill tokens) of half A.

    In the middle of the tokens, between verify rows; only where more than half of the tokens are prefill tokens is a
    chunk cut inside. Half B of that chunk sees what half A wrote: in every layer A's writes are issued first.
    """
    num_prefill = int(plan.arrays.num_tokens[plan.num_verify :].sum())
    q_len = 1 + plan.k
    middle = (plan.num_verify * q_len + num_prefill + 1) // 2
    rows = min(-(-middle // q_len), plan.num_verify)
    return rows, max(middle - plan.num_verify * q_len, 0)


def _parts(plan: StepPlan, num_prefill: int) -> tuple[_Part, ...]:
    end = plan.num_verify * (1 + plan.k) + num_prefill
    if not plan.split:
        return (_Part(0, plan.num_verify, 0, end),)
    rows, tokens = split_rows(plan)
    cut = rows * (1 + plan.k) + tokens
    return _Part(0, rows, 0, cut), _Part(rows, plan.num_verify, cut, end)


def _decode_rows(
    plan: StepPlan, state: DeviceState, slots: Tensor, positions: Tensor, rows: slice
) -> DecodeGroup | None:
    if rows.start == rows.stop:
        return None
    return decode_group(state, slots[rows], positions[rows], int(plan.arrays.kv_bounds[rows].max()))


def _has_dummy(plan: StepPlan) -> bool:
    return bool((plan.arrays.slots == DUMMY_SLOT).any())


def _prefill_tokens(plan: StepPlan) -> _HostRows:
    arrays = plan.arrays
    counts = arrays.num_tokens[plan.num_verify :]
    ends = np.cumsum(counts)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return _HostRows(
        token_slots=np.repeat(arrays.slots[plan.num_verify :], counts),
        positions=(np.repeat(arrays.starts[plan.num_verify :], counts) + within).astype(np.int32),
        ends=(ends + plan.num_verify * (1 + plan.k)).astype(np.int32),
    )


def _prefill_rows(plan: StepPlan, state: DeviceState, host: _HostRows, part: _Part) -> tuple[PrefillRow, ...]:
    """The chunks, or pieces of chunks, among the tokens of `part`; their places count from its first token."""
    arrays, rows = plan.arrays, []
    for row, end in enumerate(host.ends.tolist(), start=plan.num_verify):
        begin = end - int(arrays.num_tokens[row])
        low, high = max(begin, part.begin), min(end, part.end)
        if low >= high:
            continue
        start = int(arrays.starts[row]) + low - begin
        num_pages = -(-(start + high - low) // state.page_size)
        pages = state.page_table[int(arrays.slots[row]), :num_pages]
        rows.append(PrefillRow(begin=low - part.begin, end=high - part.begin, start=start, pages=pages))
    return tuple(rows)
