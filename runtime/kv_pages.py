"""The page pool: reference counts, prefix reuse and its integrity check. Host-side books only, no KV data.

A page is free when nobody refers to it. Free pages that still carry a published hash are kept in order of last use
and given out only when no other free page is left.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

PageArray = NDArray[np.int32]


def chain_hash(previous: bytes, tokens: NDArray[np.int32]) -> bytes:
    """Hash of a page given the hash of the page before it; `tokens` are the page's plus the drafter's lookahead."""
    return hashlib.blake2b(previous + tokens.tobytes(), digest_size=16).digest()


class PagePool:
    """Pages `1 .. num_pages - 1`; page 0 is the dummy that masked writes go to and is never given out."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, num_pages
        self.num_pages = num_pages
        self._ref_count = np.zeros(num_pages, np.int32)
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # a stack: the end is taken first
        self._num_free = num_pages - 1
        self._cached_free: OrderedDict[int, None] = OrderedDict()
        self._page_of_hash: dict[bytes, int] = {}
        self._hash_of_page: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        return self._num_free + len(self._cached_free)

    @property
    def num_in_use(self) -> int:
        return self.num_pages - 1 - self.num_available

    @property
    def num_published(self) -> int:
        return len(self._page_of_hash)

    def take(self, count: int) -> PageArray:
        """`count` pages with one reference each. The caller has checked `num_available`."""
        assert count <= self.num_available, (count, self.num_available)
        if count > self._num_free:
            self._evict(count - self._num_free)
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count].copy()
        self._ref_count[pages] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each published page of a prefix match."""
        for page in pages:
            if self._ref_count[page] == 0:
                del self._cached_free[page]
            self._ref_count[page] += 1

    def release(self, pages: PageArray) -> None:
        """Drop one reference to each page; later pages of a sequence become available for reuse first."""
        np.subtract.at(self._ref_count, pages, 1)
        assert self._ref_count[pages].min(initial=0) >= 0, "page released more often than taken"
        unused = np.unique(pages[self._ref_count[pages] == 0])
        if not self._hash_of_page:
            self._push_free(unused)
            return
        cached = np.array([int(page) in self._hash_of_page for page in unused], bool)
        self._push_free(unused[~cached])
        order = {int(page): i for i, page in enumerate(pages)}
        for page in sorted((int(p) for p in unused[cached]), key=lambda p: -order[p]):
            self._cached_free[page] = None

    def publish(self, page: int, page_hash: bytes) -> None:
        """Offer a full, final page for reuse. A second page of equal content stays private."""
        if page_hash not in self._page_of_hash and page not in self._hash_of_page:
            self._page_of_hash[page_hash] = page
            self._hash_of_page[page] = page_hash

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest published prefix of `hashes`."""
        pages: list[int] = []
        for page_hash in hashes:
            page = self._page_of_hash.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_reclaimed(self, pages: Sequence[int]) -> int:
        """How many of `pages` a `share` would take out of the available ones."""
        return sum(1 for page in pages if self._ref_count[page] == 0)

    def reset_prefix_cache(self) -> None:
        """Forget every published page; those in use stay with their requests."""
        self._page_of_hash.clear()
        self._hash_of_page.clear()
        self._push_free(np.fromiter(self._cached_free, np.int32, len(self._cached_free)))
        self._cached_free.clear()

    def check(self, owners: Sequence[PageArray]) -> None:
        """Assert that the books balance: `owners` are the page lists of every live holder, fences included."""
        counted = np.zeros(self.num_pages, np.int32)
        for pages in owners:
            np.add.at(counted, pages, 1)
        assert (counted == self._ref_count).all(), "reference counts differ from the holders' lists"
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert (self._ref_count[free] == 0).all(), "a free page is referred to"
        assert counted[0] == 0, "page 0 was given out"
        assert not any(int(p) in self._hash_of_page for p in free), "a plain free page is published"
        assert all(self._ref_count[p] == 0 for p in self._cached_free), "a cached free page is referred to"
        in_use = int((self._ref_count > 0).sum())
        assert in_use == self.num_in_use, (in_use, self.num_in_use)

    def _evict(self, count: int) -> None:
        """Forget the `count` published pages that have been out of use for longest."""
        pages = list(islice(self._cached_free, count))
        for page in pages:
            del self._cached_free[page]
            del self._page_of_hash[self._hash_of_page.pop(page)]
        self._push_free(np.array(pages, np.int32))

    def _push_free(self, pages: PageArray) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)
