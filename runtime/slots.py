"""The scheduler's slot-indexed books in numpy, so that planning a decode step loops over no request.

For a request with `committed` tokens known to the host, steps in flight will add between `in_flight_min` and
`in_flight_max` more; the true length lives on the device.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from runtime.kv_pages import PageArray, PagePool

SlotArray = NDArray[np.int64]


class SlotTables:
    """Slots `1 .. num_slots - 1`; slot 0 is the dummy. Owns the page pool, since pages are held through slots."""

    def __init__(self, *, num_slots: int, max_model_len: int, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.committed = np.zeros(num_slots, np.int64)
        self.in_flight_min = np.zeros(num_slots, np.int64)
        self.in_flight_max = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.arrival = np.full(num_slots, -1, np.int64)  # -1: slot not held
        self.epoch = np.zeros(num_slots, np.int64)  # one per admission; results of another epoch are discarded
        self.decoding = np.zeros(num_slots, bool)
        self.draft_cap = np.zeros(num_slots, np.int64)
        self.num_logprobs = np.full(num_slots, -1, np.int64)
        self.num_pages = np.zeros(num_slots, np.int64)
        self.num_published = np.zeros(num_slots, np.int64)
        self.page_table = np.zeros((num_slots, -(-max_model_len // page_size)), np.int32)
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._next_epoch = 1
        self._fences: deque[tuple[int, int, PageArray]] = deque()  # (last step that refers to them, slot, pages)
        self.num_fenced_pages = 0

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_slots_in_use(self) -> int:
        return len(self.committed) - 1 - len(self._free_slots)

    def acquire(self, *, arrival: int, committed: int, limit: int, pages: PageArray) -> int:
        """A slot holding `pages` for a newly admitted request."""
        slot = self._free_slots.pop()
        self.committed[slot], self.limit[slot], self.arrival[slot] = committed, limit, arrival
        self.in_flight_min[slot] = self.in_flight_max[slot] = self.num_published[slot] = 0
        self.epoch[slot], self._next_epoch = self._next_epoch, self._next_epoch + 1
        self.page_table[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        return slot

    def pages_for(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-positions // self.page_size)

    def grow(self, slots: SlotArray, counts: NDArray[np.int64]) -> tuple[SlotArray, SlotArray, PageArray]:
        """Give `counts[i]` more pages to `slots[i]`; returns (slot, table index, page) of every new page."""
        owners = np.repeat(slots, counts)
        first = np.repeat(self.num_pages[slots] - np.cumsum(counts) + counts, counts)
        index = first + np.arange(len(owners))
        pages = self.pool.take(len(owners))
        self.page_table[owners, index] = pages
        self.num_pages[slots] += counts
        return owners, index, pages

    def let_go(self, slot: int, last_step: int, retired_step: int) -> None:
        """Free a slot and its pages once the last step that refers to them has retired."""
        pages = self.page_table[slot, : self.num_pages[slot]].copy()
        self.arrival[slot], self.epoch[slot], self.decoding[slot] = -1, 0, False
        self.num_pages[slot] = 0
        if last_step <= retired_step:
            self._return(slot, pages)
        else:
            self._fences.append((last_step, slot, pages))
            self.num_fenced_pages += len(pages)

    def retire(self, step_id: int) -> None:
        while self._fences and self._fences[0][0] <= step_id:
            _, slot, pages = self._fences.popleft()
            self.num_fenced_pages -= len(pages)
            self._return(slot, pages)

    def check(self) -> None:
        """Assert that every page is held exactly as often as the books say."""
        held = [self.page_table[s, : self.num_pages[s]] for s in np.flatnonzero(self.arrival >= 0)]
        self.pool.check([*held, *(pages for _, _, pages in self._fences)])

    def _return(self, slot: int, pages: PageArray) -> None:
        self.pool.release(pages)
        self._free_slots.append(slot)
