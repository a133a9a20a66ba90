"""Page allocator and prefix cache: cases by hand, a random driver, and planted bugs that it must find."""

from __future__ import annotations

import pytest

from tests.null.sim.bugs import CACHE, planted
from tests.null.sim.cache_driver import Driver
from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import NoPrefixCache, PrefixCursor, RadixTree

CAUGHT = (AssertionError, KeyError, IndexError)


def made(pages: int = 20, page_size: int = 2) -> tuple[PageAllocator, RadixTree]:
    tree = RadixTree(page_size)
    return PageAllocator(pages, tree), tree


def cache(allocator: PageAllocator, tokens: list[int], salt: int = 0) -> tuple[PrefixCursor, list[int]]:
    """A sequence that computed all its full pages and still holds them."""
    path = PrefixCursor(tokens, salt)
    count = len(tokens) // allocator.page_size
    allocator.tree.match(path, count)
    hit = allocator.tree.pages(path)
    allocator.acquire(hit)
    pages = hit + allocator.allocate(count - len(hit))
    allocator.tree.insert(path, pages, count)
    return path, pages


def found(tree: RadixTree, tokens: list[int], most: int = 99, salt: int = 0) -> list[int]:
    path = PrefixCursor(tokens, salt)
    assert tree.match(path, min(most, len(tokens) // tree.page_size)) == path.depth
    return tree.pages(path)


def test_the_null_page_is_never_handed_out():
    allocator, _ = made(pages=5)
    assert sorted(allocator.allocate(4)) == [1, 2, 3, 4]
    assert allocator.num_available() == 0
    assert PageAllocator(2, NoPrefixCache(2)).allocate(1) == [1]


def test_a_page_is_free_when_its_last_holder_leaves():
    allocator, _ = made()
    pages = allocator.allocate(2)
    allocator.acquire(pages)
    allocator.release(pages)
    assert allocator.num_available() == 17
    allocator.release(pages)
    assert allocator.num_available() == 19
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(pages)


def test_a_hit_is_exact_and_page_aligned():
    allocator, tree = made()
    _, pages = cache(allocator, [1, 2, 3, 4, 5, 6])
    assert found(tree, [1, 2, 3, 4, 5, 6]) == pages
    assert found(tree, [1, 2, 3, 4, 5, 9]) == pages[:2]
    assert found(tree, [1, 2, 3]) == pages[:1]
    assert found(tree, [1, 2, 3, 4, 5, 6], most=1) == pages[:1]
    assert found(tree, [3, 4, 5, 6]) == []
    assert found(tree, [1, 2, 3, 4], salt=1) == []


def test_equal_pages_are_cached_once_and_continued_from_either():
    allocator, tree = made()
    path, first = cache(allocator, [1, 2])
    twin = PrefixCursor([1, 2, 3, 4], 0)
    own = allocator.allocate(2)
    tree.match(twin, 0)
    tree.insert(twin, own, 2)
    assert found(tree, [1, 2, 3, 4]) == [first[0], own[1]]
    assert tree.num_cached == 2 and path.node is not None


def test_cached_pages_are_evicted_oldest_first_when_none_is_free():
    allocator, tree = made(pages=7)
    _, a = cache(allocator, [1, 1, 2, 2])
    _, b = cache(allocator, [3, 3, 4, 4])
    allocator.release(a)
    allocator.release(b)
    assert (len(allocator.free_pages), tree.num_evictable, allocator.num_available()) == (2, 4, 6)
    allocator.allocate(2)
    assert tree.num_cached == 4
    allocator.allocate(1)
    assert found(tree, [1, 1, 2, 2]) == a[:1], "the end of the older sequence goes first"
    allocator.allocate(2)
    assert found(tree, [1, 1, 2, 2]) == [] and found(tree, [3, 3, 4, 4]) == b[:1]


def test_a_hit_makes_a_prefix_young_again():
    allocator, tree = made(pages=5)
    _, a = cache(allocator, [1, 1, 2, 2])
    _, b = cache(allocator, [3, 3, 4, 4])
    allocator.release(a)
    allocator.release(b)
    _, again = cache(allocator, [1, 1, 2, 2])
    allocator.release(again)
    allocator.allocate(2)
    assert found(tree, [1, 1, 2, 2]) == a and found(tree, [3, 3, 4, 4]) == []


def test_evicting_above_a_held_page_drops_the_subtree_and_keeps_the_page():
    allocator, tree = made(pages=4)
    _, parent = cache(allocator, [1, 2])
    child = PrefixCursor([1, 2, 3, 4], 0)
    own = allocator.allocate(2)
    tree.match(child, 0)
    tree.insert(child, own, 2)  # its first page is the other's
    allocator.release(parent)
    assert allocator.num_available() == 1
    assert allocator.allocate(1) == parent
    assert tree.num_cached == 0 and allocator.ref_counts[own[1]] == 1
    tree.insert(child, own, 2)  # the cursor died; its own pages enter anew
    assert found(tree, [1, 2, 3, 4]) == own


def test_a_flush_forgets_everything_and_what_was_computed_before():
    allocator, tree = made()
    path, pages = cache(allocator, [1, 2, 3, 4])
    _, idle = cache(allocator, [5, 6])
    allocator.release(idle)
    allocator.flush()
    assert (tree.num_cached, tree.num_evictable, allocator.num_available()) == (0, 0, 17)
    tree.insert(path, pages, 2)
    assert found(tree, [1, 2, 3, 4]) == [] and tree.num_cached == 0
    allocator.release(pages)
    assert allocator.num_available() == len(allocator.free_pages) == 19


def test_matching_goes_on_from_where_a_sequence_stands():
    allocator, tree = made()
    waiting = PrefixCursor([1, 2, 3, 4, 5, 6], 0)
    assert tree.match(waiting, 3) == 0
    _, pages = cache(allocator, [1, 2, 3, 4])
    assert tree.match(waiting, 3) == 2
    cache(allocator, [1, 2, 3, 4, 5, 6])
    assert tree.match(waiting, 3) == 3
    allocator.flush()
    assert tree.match(waiting, 3) == 0


def test_requests_that_miss_the_same_page_share_a_next_missing_page():
    allocator, tree = made()
    one, two, other, short = (PrefixCursor(t, 0) for t in ([1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 9, 9], [1]))
    for path in (one, two, other, short):
        tree.match(path, 0)
    assert tree.next_missing_page(one) == tree.next_missing_page(two) == tree.next_missing_page(other) is not None
    assert tree.next_missing_page(short) is None
    cache(allocator, [1, 2])
    for path in (one, two, other):
        tree.match(path, 1)
    assert tree.next_missing_page(one) == tree.next_missing_page(two) != tree.next_missing_page(other)


def test_evicted_salts_leave_no_tree_roots():
    allocator, tree = made(pages=3)
    for salt in range(50):
        _, pages = cache(allocator, [1, 2], salt)
        allocator.release(pages)
    assert len(tree._top.children) == tree.num_cached == 2


def test_without_a_prefix_cache_nothing_hits():
    allocator = PageAllocator(10, NoPrefixCache(2))
    _, pages = cache(allocator, [1, 2, 3, 4])
    assert allocator.tree.match(PrefixCursor([1, 2, 3, 4], 0), 2) == 0
    allocator.release(pages)
    allocator.flush()
    assert allocator.num_available() == len(allocator.free_pages) == 9


@pytest.mark.parametrize("seed", range(5))
def test_random_operations(seed: int):
    count = Driver(seed, pages=(12, 18, 25, 40, 44)[seed], page_size=1 + seed % 3).run(2000)
    assert all(
        count[what]
        for what in ("hits", "misses", "evicted", "refused", "inserts", "grown", "left", "pinned", "trimmed")
    ), count


@pytest.mark.parametrize("bug", CACHE)
def test_the_random_driver_catches(bug: str):
    with planted(bug):
        for seed in range(20):
            try:
                Driver(seed, audit=1).run(500)
            except CAUGHT:
                return
    pytest.fail(f"missed {bug}")
