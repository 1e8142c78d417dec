"""The page pool against a model of it: whatever is taken, shared, published and released, the books balance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.kv_pages import PageArray, PagePool, chain_hash

NUM_PAGES = 12


class PoolMachine(RuleBasedStateMachine):
    """`sequences` hold pages as requests do; `published` is what the pool should still know, oldest use first."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.sequences: list[list[int]] = []
        self.published: dict[bytes, int] = {}
        self.next_hash = 0

    @property
    def held(self) -> set[int]:
        return {page for pages in self.sequences for page in pages}

    @rule(count=st.integers(0, NUM_PAGES))
    def take(self, count: int) -> None:
        if count > NUM_PAGES - 1 - len(self.held):
            assert count > self.pool.num_available
            with pytest.raises(AssertionError):
                self.pool.take(count)
            return
        unpublished = NUM_PAGES - 1 - len(self.held | set(self.published.values()))
        pages = self.pool.take(count).tolist()
        assert len(set(pages)) == count
        assert 0 not in pages
        assert not self.held & set(pages)
        evicted = {h for h, page in self.published.items() if page in pages}
        assert len(evicted) == max(0, count - unpublished), "published pages go last"
        self.published = {h: page for h, page in self.published.items() if h not in evicted}
        self.sequences.append(pages)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(np.array(pages, np.int32))

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        hashes = data.draw(st.lists(st.sampled_from(sorted(self.published)), unique=True, max_size=4))
        pages = [self.published[h] for h in hashes]
        assert self.pool.match(hashes) == pages
        assert self.pool.num_reclaimed(pages) == len(set(pages) - self.held)
        self.pool.share(pages)
        self.sequences.append(pages)

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data(), known=st.booleans())
    def publish(self, data: st.DataObject, known: bool) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        if known and self.published:
            page_hash = data.draw(st.sampled_from(sorted(self.published)))
        else:
            page_hash, self.next_hash = self.next_hash.to_bytes(16, "big"), self.next_hash + 1
        self.pool.publish(page, page_hash)
        if page_hash not in self.published and page not in self.published.values():
            self.published[page_hash] = page

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.published = {}

    @invariant()
    def books_balance(self) -> None:
        self.pool.check([np.array(pages, np.int32) for pages in self.sequences])
        assert self.pool.num_in_use == len(self.held)
        assert self.pool.num_available == NUM_PAGES - 1 - len(self.held)
        assert self.pool.num_published == len(self.published)
        for page_hash, page in self.published.items():
            assert self.pool.match([page_hash]) == [page]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def publish(pool: PagePool, pages: PageArray, name: bytes) -> list[bytes]:
    hashes = [name + bytes([i]) for i in range(len(pages))]
    for page, page_hash in zip(pages.tolist(), hashes, strict=True):
        pool.publish(page, page_hash)
    return hashes


def test_the_least_recently_used_sequence_goes_first_and_its_end_before_its_beginning() -> None:
    pool = PagePool(10)
    first, second = pool.take(3), pool.take(3)
    a, b = publish(pool, first, b"a"), publish(pool, second, b"b")
    pool.release(second)
    pool.release(first)
    pool.share(pool.match(b))  # used again: now younger than the first
    pool.release(second)
    plain = pool.take(3)  # the three that carry nothing
    assert not {*first, *second} & {*plain}
    assert [pool.take(1)[0] for _ in range(6)] == [*first[::-1], *second[::-1]]
    assert pool.match(a) == pool.match(b) == []
    assert pool.num_available == pool.num_published == 0


def test_a_chain_that_lost_its_beginning_is_not_matched() -> None:
    pool = PagePool(10)
    pages = pool.take(3)
    hashes = publish(pool, pages, b"a")
    assert pool.match([*hashes, b"other"]) == pages.tolist()
    assert pool.match([b"other", *hashes]) == []
    assert pool.match([hashes[0], b"other", hashes[2]]) == [pages[0]]


def test_a_page_in_use_is_never_evicted() -> None:
    pool = PagePool(5)
    pages = pool.take(4)
    hashes = publish(pool, pages, b"a")
    pool.share(pool.match(hashes[:2]))
    pool.release(pages)
    assert pool.num_available == 2
    assert {*pool.take(2)} == {*pages[2:]}
    assert pool.match(hashes) == pages[:2].tolist()


def test_a_release_too_many_is_noticed() -> None:
    pool = PagePool(5)
    pages = pool.take(2)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages[:1])


def test_check_sees_what_does_not_add_up() -> None:
    pool = PagePool(6)
    pages = pool.take(2)
    pool.check([pages])
    for owners in ([], [pages, pages], [pages[:1]]):
        with pytest.raises(AssertionError, match="reference counts"):
            pool.check(owners)


def test_a_hash_depends_on_all_tokens_before_it_and_on_the_lookahead() -> None:
    tokens = np.arange(5, dtype=np.int32)
    base = chain_hash(b"", tokens)
    assert chain_hash(b"", tokens.copy()) == base
    assert chain_hash(base, tokens) != base
    for i in range(5):
        other = tokens.copy()
        other[i] += 1
        assert chain_hash(b"", other) != base
