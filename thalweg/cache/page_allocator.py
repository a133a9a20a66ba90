"""Reference-counted pages of the KV cache. A page is free, in use, or evictable (cached, and nobody uses it).

Users of a page are requests, until their last step in flight has retired, and transfers. The prefix cache evicts pages
only when no page is free, least recently used first.
"""

from __future__ import annotations

from typing import Iterable, Sequence

from thalweg.cache.radix import PrefixCursor, RadixTree
from thalweg.core.errors import InvalidRequest
from thalweg.core.plan import NULL_PAGE


class PageAllocator:
    """Allocates `pages` pages except page 0, the null page. `tree` caches the contents of full pages."""

    def __init__(self, pages: int, tree: RadixTree) -> None:
        self.tree = tree
        self.page_size = tree.page_size
        self.ref_counts = [0] * pages
        self.free_pages = list(range(pages - 1, NULL_PAGE, -1))  # last in, first out

    @property
    def num_pages(self) -> int:
        """Pages that can be allocated."""
        return len(self.ref_counts) - 1

    def num_available(self) -> int:
        """Pages that are free or evictable."""
        return len(self.free_pages) + self.tree.num_evictable

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` pages of any content, at most `num_available()`."""
        free, ref_counts = self.free_pages, self.ref_counts
        if count > len(free):
            free.extend(self.tree.evict(count - len(free)))
        pages = [free.pop() for _ in range(count)]
        for page in pages:
            ref_counts[page] = 1
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Adds a reference to each of these pages, which are in use or evictable."""
        ref_counts = self.ref_counts
        for page in pages:
            if not ref_counts[page]:
                self.tree.mark_in_use(page)
            ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drops a reference to each of these pages, which are in the order of their positions."""
        ref_counts = self.ref_counts
        for page in reversed(pages):  # the end of a sequence becomes evictable, and is evicted, before its beginning
            assert ref_counts[page] > 0, f"page {page} was released twice"
            ref_counts[page] -= 1
            if not ref_counts[page] and not self.tree.mark_evictable(page):
                self.free_pages.append(page)

    def cache_prompts(self, prompts: Iterable[Sequence[int]]) -> None:
        """Makes pages of any content the cached prefixes of these prompts, where they are not cached. Other prefixes
        may be evicted. Raises InvalidRequest where there are too few pages.
        """
        held, tree = list[list[int]](), self.tree
        try:
            for prompt in prompts:
                cursor, count = PrefixCursor(prompt, 0), len(prompt) // self.page_size
                missing = count - tree.match(cursor, count)
                held.append(tree.pages(cursor))
                self.acquire(held[-1])
                if missing > self.num_available():
                    raise InvalidRequest(
                        "prompts",
                        f"they need more than the cache's {self.num_pages:,} pages: use more --max-total-tokens",
                    )
                held[-1] += self.allocate(missing)
                tree.insert(cursor, held[-1], count)
        finally:
            for pages in held:
                self.release(pages)

    def evict_tail(self, cursor: PrefixCursor, keep: int) -> None:
        """Frees the evictable pages at the end of an ended sequence, beyond its first `keep` pages."""
        self.free_pages.extend(self.tree.evict_tail(cursor, keep))

    def flush(self) -> None:
        """Empties the prefix cache. Pages in use stay with their users and are cached no more."""
        self.free_pages.extend(self.tree.flush())
