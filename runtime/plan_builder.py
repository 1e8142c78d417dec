"""Collects the parts of one plan while the scheduler decides, then lays them out as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.plan import PlanArrays, StepPlan
from runtime.request_state import RequestState
from runtime.sampling_params import stack_params

_EMPTY = np.zeros(0, np.int32)
_ZERO = np.zeros(1, np.int32)
_NO_REQUESTS: dict[str, NDArray[Any]] = dict(
    new_slots=_EMPTY, new_limits=_EMPTY, new_cu_tokens=_ZERO, new_tokens=_EMPTY, new_params=np.zeros(0, np.uint8),
    new_bias_ids=_EMPTY, new_bias_values=np.zeros(0, np.float32), new_masked_ids=_EMPTY,
)


class PlanBuilder:
    """Prefill rows, page grants and new requests of a step of `k` drafts; verify rows come whole at the end."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._prefill: list[tuple[int, int, int, bool, bool]] = []
        self._pages: list[tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]] = []
        self._new: list[tuple[int, RequestState]] = []

    @property
    def num_rows(self) -> int:
        return len(self._prefill)

    def add_prefill(self, slot: int, *, start: int, num_tokens: int, samples: bool, carries: bool) -> None:
        self._prefill.append((slot, num_tokens, start, samples, carries))

    def add_pages(
        self, slots: NDArray[np.integer], index: NDArray[np.integer], pages: NDArray[np.integer]
    ) -> None:
        if len(pages):
            self._pages.append((slots, index, pages))

    def add_request(self, slot: int, state: RequestState) -> None:
        self._new.append((slot, state))

    def build(
        self, step_id: int, *, verify_slots: NDArray[np.int64], verify_bounds: NDArray[np.int64],
        freed_slots: Sequence[int], num_logprobs: NDArray[np.int64],
    ) -> StepPlan:
        ones = np.ones(len(verify_slots), np.int32)
        lengths, bounds = ones * (1 + self._k), verify_bounds.astype(np.int32)
        columns = [verify_slots.astype(np.int32), lengths, -ones, bounds, ones, ones]  # in the order of PlanArrays
        if self._prefill:  # not in a decode step, the one that must be planned fast
            slots, num_tokens, starts, samples, carries = np.array(self._prefill, np.int32).T
            chunks = [slots, num_tokens, starts, starts + num_tokens, samples, carries]
            columns = [np.concatenate(parts) for parts in zip(columns, chunks, strict=True)]
        if self._pages:
            page_slots, page_index, pages = (
                np.concatenate(column, dtype=np.int32, casting="same_kind")
                for column in zip(*self._pages, strict=True)
            )
        else:
            page_slots = page_index = pages = _EMPTY
        arrays = PlanArrays(
            slots=columns[0], num_tokens=columns[1], starts=columns[2], kv_bounds=columns[3], samples=columns[4],
            carries=columns[5],
            page_slots=page_slots, page_index=page_index, pages=pages,
            freed_slots=np.array(freed_slots, np.int32), **(_new_requests(self._new) if self._new else _NO_REQUESTS),
        )
        most_logprobs = int(num_logprobs[arrays.slots].max(initial=-1))
        return StepPlan(
            step_id=step_id, k=self._k, num_verify=len(ones), num_logprobs=most_logprobs, split=False, arrays=arrays
        )


def _new_requests(new: Sequence[tuple[int, RequestState]]) -> dict[str, NDArray[Any]]:
    states = [state for _, state in new]
    params = stack_params([state.params for state in states])
    return dict(
        new_slots=np.array([slot for slot, _ in new], np.int32),
        new_limits=np.array([state.limit for state in states], np.int32),
        new_cu_tokens=np.concatenate((_ZERO, np.cumsum([len(state.tokens) for state in states], dtype=np.int32))),
        new_tokens=np.concatenate([np.array(state.tokens, np.int32) for state in states]),
        new_params=np.frombuffer(params.rows.tobytes(), np.uint8),
        new_bias_ids=params.bias_ids.astype(np.int32),
        new_bias_values=params.bias_values,
        new_masked_ids=params.masked_ids.astype(np.int32),
    )
