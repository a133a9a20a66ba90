"""The page books: every page but the null page is free, leased, or idle (cached by the prefix tree and leased by
nobody).

A page is free only when its lease count is zero. The count is the number of its holders: the requests that read or
write it until their last step in flight has retired, and transfers under way. `spare()` pages can be had at once: the
free ones, then the idle ones, which the tree gives up in order of last use and only when nothing is free.
"""

from __future__ import annotations

from typing import Iterable, Sequence

from thalweg.cache.radix import Path, PrefixTree
from thalweg.core.plan import NULL_PAGE


class Books:
    """Leases of `pages` pages, of which page 0 is the null page and is never handed out. `tree` caches the contents of
    full ones.
    """

    def __init__(self, pages: int, tree: PrefixTree) -> None:
        if pages < 2:
            raise ValueError(f"{pages} pages: there must be the null page and at least one to lease")
        self.tree = tree
        self.page_size = tree.page_size
        self.lease = [0] * pages
        self.free = list(range(pages - 1, NULL_PAGE, -1))  # last in, first out: warm, and hard on stale readers

    @property
    def total(self) -> int:
        """Pages that can be leased: all but the null page."""
        return len(self.lease) - 1

    def spare(self) -> int:
        return len(self.free) + self.tree.idle

    def take(self, count: int) -> list[int]:
        """Leases `count` pages of no particular content. `count` is at most `spare()`; the caller has asked."""
        free, lease = self.free, self.lease
        if count > len(free):
            free.extend(self.tree.evict(count - len(free)))
        taken = [free.pop() for _ in range(count)]
        for page in taken:
            lease[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """One more lease on each of these pages, which are leased or idle."""
        lease = self.lease
        for page in pages:
            if not lease[page]:
                self.tree.wake(page)
            lease[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """One lease less on each of these pages, given in the order of their positions."""
        lease = self.lease
        for page in reversed(pages):  # the end of a sequence becomes idle first, so it is evicted before its beginning
            assert lease[page] > 0, f"the lease of page {page} was dropped twice"
            lease[page] -= 1
            if not lease[page] and not self.tree.rest(page):
                self.free.append(page)

    def trim(self, path: Path, count: int) -> None:
        """Frees the idle pages at the end of `path`, beyond its first `count`. For sequences that have ended."""
        self.free.extend(self.tree.trim(path, count))

    def flush(self) -> None:
        """Empties the prefix cache. Leased pages stay with their holders and stop being cached."""
        self.free.extend(self.tree.flush())
