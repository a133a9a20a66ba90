"""The page books and the prefix tree: cases by hand, a random driver, and bugs that it must catch."""

from __future__ import annotations

import pytest

from tests.null.sim.books_driver import Driver
from tests.null.sim.bugs import BOOKS, planted
from thalweg.cache.books import Books
from thalweg.cache.radix import NoTree, Path, RadixTree

CAUGHT = (AssertionError, KeyError, IndexError)


def made(pages: int = 20, page_size: int = 2) -> tuple[Books, RadixTree]:
    tree = RadixTree(page_size)
    return Books(pages, tree), tree


def cache(books: Books, tokens: list[int], salt: int = 0) -> tuple[Path, list[int]]:
    """A sequence that computed all its full pages and still holds them."""
    path = Path(tokens, salt)
    count = len(tokens) // books.page_size
    books.tree.match(path, count)
    hit = books.tree.pages(path)
    books.hold(hit)
    pages = hit + books.take(count - len(hit))
    books.tree.insert(path, pages, count)
    return path, pages


def found(tree: RadixTree, tokens: list[int], most: int = 99, salt: int = 0) -> list[int]:
    path = Path(tokens, salt)
    assert tree.match(path, min(most, len(tokens) // tree.page_size)) == path.depth
    return tree.pages(path)


def test_the_null_page_is_never_handed_out():
    books, _ = made(pages=5)
    assert sorted(books.take(4)) == [1, 2, 3, 4]
    assert books.spare() == 0
    assert Books(2, NoTree(2)).take(1) == [1]
    with pytest.raises(ValueError, match="null page"):
        Books(1, NoTree(2))


def test_a_page_is_free_when_its_last_holder_leaves():
    books, _ = made()
    pages = books.take(2)
    books.hold(pages)
    books.drop(pages)
    assert books.spare() == 17
    books.drop(pages)
    assert books.spare() == 19
    with pytest.raises(AssertionError, match="dropped twice"):
        books.drop(pages)


def test_a_hit_is_exact_and_page_aligned():
    books, tree = made()
    _, pages = cache(books, [1, 2, 3, 4, 5, 6])
    assert found(tree, [1, 2, 3, 4, 5, 6]) == pages
    assert found(tree, [1, 2, 3, 4, 5, 9]) == pages[:2]
    assert found(tree, [1, 2, 3]) == pages[:1]
    assert found(tree, [1, 2, 3, 4, 5, 6], most=1) == pages[:1]
    assert found(tree, [3, 4, 5, 6]) == []
    assert found(tree, [1, 2, 3, 4], salt=1) == []


def test_equal_pages_are_cached_once_and_continued_from_either():
    books, tree = made()
    path, first = cache(books, [1, 2])
    twin = Path([1, 2, 3, 4], 0)
    own = books.take(2)
    tree.match(twin, 0)
    tree.insert(twin, own, 2)
    assert found(tree, [1, 2, 3, 4]) == [first[0], own[1]]
    assert tree.cached == 2 and path.node is not None


def test_cached_pages_are_evicted_only_when_nothing_is_free_and_oldest_first():
    books, tree = made(pages=7)
    _, a = cache(books, [1, 1, 2, 2])
    _, b = cache(books, [3, 3, 4, 4])
    books.drop(a)
    books.drop(b)
    assert (len(books.free), tree.idle, books.spare()) == (2, 4, 6)
    books.take(2)
    assert tree.cached == 4
    books.take(1)
    assert found(tree, [1, 1, 2, 2]) == a[:1], "the end of the older sequence goes first"
    books.take(2)
    assert found(tree, [1, 1, 2, 2]) == [] and found(tree, [3, 3, 4, 4]) == b[:1]


def test_a_hit_makes_a_prefix_young_again():
    books, tree = made(pages=5)
    _, a = cache(books, [1, 1, 2, 2])
    _, b = cache(books, [3, 3, 4, 4])
    books.drop(a)
    books.drop(b)
    _, again = cache(books, [1, 1, 2, 2])
    books.drop(again)
    books.take(2)
    assert found(tree, [1, 1, 2, 2]) == a and found(tree, [3, 3, 4, 4]) == []


def test_evicting_above_a_leased_page_drops_the_subtree_and_spares_the_page():
    books, tree = made(pages=4)
    _, parent = cache(books, [1, 2])
    child = Path([1, 2, 3, 4], 0)
    own = books.take(2)
    tree.match(child, 0)
    tree.insert(child, own, 2)  # its first page is the other's
    books.drop(parent)
    assert books.spare() == 1
    assert books.take(1) == parent
    assert tree.cached == 0 and books.lease[own[1]] == 1
    tree.insert(child, own, 2)  # the cursor died; its own pages enter anew
    assert found(tree, [1, 2, 3, 4]) == own


def test_a_flush_forgets_everything_and_what_was_computed_before():
    books, tree = made()
    path, pages = cache(books, [1, 2, 3, 4])
    _, idle = cache(books, [5, 6])
    books.drop(idle)
    books.flush()
    assert (tree.cached, tree.idle, books.spare()) == (0, 0, 17)
    tree.insert(path, pages, 2)
    assert found(tree, [1, 2, 3, 4]) == [] and tree.cached == 0
    books.drop(pages)
    assert books.spare() == len(books.free) == 19


def test_matching_goes_on_from_where_a_sequence_stands():
    books, tree = made()
    waiting = Path([1, 2, 3, 4, 5, 6], 0)
    assert tree.match(waiting, 3) == 0
    _, pages = cache(books, [1, 2, 3, 4])
    assert tree.match(waiting, 3) == 2
    cache(books, [1, 2, 3, 4, 5, 6])
    assert tree.match(waiting, 3) == 3
    books.flush()
    assert tree.match(waiting, 3) == 0


def test_the_frontier_is_shared_by_who_would_compute_the_same_page_next():
    books, tree = made()
    one, two, other, short = (Path(t, 0) for t in ([1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 9, 9], [1]))
    for path in (one, two, other, short):
        tree.match(path, 0)
    assert tree.frontier(one) == tree.frontier(two) == tree.frontier(other) is not None
    assert tree.frontier(short) is None
    cache(books, [1, 2])
    for path in (one, two, other):
        tree.match(path, 1)
    assert tree.frontier(one) == tree.frontier(two) != tree.frontier(other)


def test_salts_leave_no_roots_behind():
    books, tree = made(pages=3)
    for salt in range(50):
        _, pages = cache(books, [1, 2], salt)
        books.drop(pages)
    assert len(tree._top.children) == tree.cached == 2


def test_without_a_prefix_cache_nothing_hits():
    books = Books(10, NoTree(2))
    _, pages = cache(books, [1, 2, 3, 4])
    assert books.tree.match(Path([1, 2, 3, 4], 0), 2) == 0
    books.drop(pages)
    books.flush()
    assert books.spare() == len(books.free) == 9


@pytest.mark.parametrize("seed", range(5))
def test_random_operations(seed: int):
    count = Driver(seed, pages=(12, 18, 25, 40, 44)[seed], page_size=1 + seed % 3).run(2000)
    assert all(
        count[what]
        for what in ("hits", "misses", "evicted", "refused", "inserts", "grown", "left", "pinned", "trimmed")
    ), count


@pytest.mark.parametrize("bug", BOOKS)
def test_the_random_driver_catches(bug: str):
    with planted(bug):
        for seed in range(20):
            try:
                Driver(seed, audit=1).run(500)
            except CAUGHT:
                return
    pytest.fail(f"missed {bug}")
