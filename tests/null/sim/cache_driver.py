"""A random driver for the page allocator and the prefix cache, against a model that knows each page's content."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import PageNode, PrefixCursor, RadixTree
from thalweg.core.plan import NULL_PAGE

Content = tuple[int, int, tuple[int, ...]]  # epoch, salt, the whole prefix up to the page's end


@dataclass(eq=False)
class Holder:
    """A sequence that leases pages; the first `filled` of them have their contents."""

    path: PrefixCursor
    epoch: int
    pages: list[int]
    filled: int


class Driver:
    """Operations drawn from `seed`. After each one the counts must be exact, and after every `audit` of them everything
    is.
    """

    def __init__(self, seed: int, pages: int = 40, page_size: int = 2, audit: int = 20) -> None:
        self.rng, self.audit_every = random.Random(seed), audit
        self.size = page_size
        self.tree = RadixTree(page_size)
        self.allocator = PageAllocator(pages, self.tree)
        self.contents: dict[int, Content] = {}
        self.holders: list[Holder] = []
        self.waiting: list[PrefixCursor] = []  # matched, but not admitted yet
        self.pins: list[list[int]] = []  # transfers under way: leases without a sequence
        self.count: Counter[str] = Counter()
        self.flush_share = 0.002

    def run(self, operations: int) -> Counter[str]:
        for i in range(operations):
            self.operate()
            assert self.allocator.num_available() == len(self.allocator.free_pages) + self.tree.num_evictable
            if i % self.audit_every == 0:
                self.audit()
        self.go_home()
        return self.count

    def operate(self) -> None:
        draw = self.rng.random()
        if draw < self.flush_share:
            self._flush()
        elif draw < 0.25 or not self.holders:
            self._arrive()
        elif draw < 0.45:
            self._fill(self.rng.choice(self.holders))
        elif draw < 0.6:
            self._grow(self.rng.choice(self.holders))
        elif draw < 0.9:
            self._leave(self.holders.pop(self.rng.randrange(len(self.holders))))
        elif draw < 0.95:
            self._pin(self.rng.choice(self.holders))
        elif self.pins:
            self.allocator.release(self.pins.pop(self.rng.randrange(len(self.pins))))
            self.count["unpinned"] += 1

    # ---- operations

    def _arrive(self) -> None:
        rng = self.rng
        if self.waiting and rng.random() < 0.5:
            path = self.waiting.pop(rng.randrange(len(self.waiting)))
        else:
            path = PrefixCursor([rng.randrange(2) for _ in range(rng.randint(1, 8 * self.size))], salt=rng.randrange(2))
        tokens = path.tokens
        hit = self.tree.match(path, (len(tokens) - 1) // self.size)
        if rng.random() < 0.2:
            self.waiting.append(path)
            return
        pages = self.tree.pages(path)
        assert len(pages) == hit, "a hit of another length"
        for i, page in enumerate(pages):
            assert self.contents[page] == self._content(path, self.tree.epoch, i), (
                "a hit on a page that holds something else"
            )
        if hit < (len(tokens) - 1) // self.size:
            assert self._content(path, self.tree.epoch, hit) not in map(self.contents.get, self.tree._nodes), (
                "a page was not found"
            )
        self.allocator.acquire(pages)
        need = -(-len(tokens) // self.size) - hit
        if need > self.allocator.num_available():
            self.allocator.release(pages)
            self.count["refused"] += 1
            return
        pages += self._take(need)
        self.holders.append(Holder(path, self.tree.epoch, pages, hit))
        self.count["hits" if hit else "misses"] += 1

    def _take(self, need: int) -> list[int]:
        free, idle = len(self.allocator.free_pages), self.tree.num_evictable
        got = self.allocator.allocate(need)
        assert NULL_PAGE not in got and len(set(got)) == need
        if need <= free:
            assert self.tree.num_evictable == idle, "an eviction without need"
        else:
            self.count["evicted"] += idle - self.tree.num_evictable
        for page in got:
            self.contents.pop(page, None)
        return got

    def _fill(self, h: Holder) -> None:
        h.filled = max(h.filled, self.rng.randint(0, len(h.path.tokens) // self.size))
        for i in range(h.filled):
            self.contents[h.pages[i]] = self._content(h.path, h.epoch, i)
        self.tree.insert(h.path, h.pages, h.filled)
        self.count["inserts"] += 1

    def _grow(self, h: Holder) -> None:
        more = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 2 * self.size))]
        need = max(0, -(-(len(h.path.tokens) + len(more)) // self.size) - len(h.pages))
        if need <= self.allocator.num_available():
            h.pages += self._take(need)
            h.path.tokens.extend(more)
            self.count["grown"] += 1

    def _leave(self, h: Holder) -> None:
        if self.rng.random() < 0.7:
            self._fill(h)
        self.allocator.release(h.pages)
        self.count["left"] += 1
        if self.rng.random() < 0.3:
            self._trim(h.path)

    def _trim(self, path: PrefixCursor) -> None:
        """A finished request removes the end of its own path: only pages without a lease and without later pages."""
        before, count = set(self.tree._nodes), self.rng.randint(0, len(path.tokens) // self.size)
        leased = {page for page in before if self.allocator.ref_counts[page]}
        self.allocator.evict_tail(path, count)
        gone = before - set(self.tree._nodes)
        assert not gone & leased, "a page that somebody leases was trimmed"
        assert all(len(self.contents[page][2]) > count * self.size for page in gone), "trimmed too much"
        left = PrefixCursor(path.tokens, path.salt)
        depth, node = self.tree.match(left, len(path.tokens) // self.size), left.node
        assert depth <= count or (node is not None and (node.children or node.page in leased)), "trimmed too little"
        self.count["trimmed"] += len(gone)

    def _pin(self, h: Holder) -> None:
        pages = h.pages[: self.rng.randint(1, len(h.pages))]
        self.allocator.acquire(pages)
        self.pins.append(pages)
        self.count["pinned"] += 1

    def _flush(self) -> None:
        self.allocator.flush()
        assert not self.tree.num_cached and not self.tree.num_evictable
        self.count["flushed"] += 1

    def _content(self, path: PrefixCursor, epoch: int, page: int) -> Content:
        return epoch, path.salt, tuple(path.tokens[: (page + 1) * self.size])

    # ---- the audit

    def audit(self) -> None:
        allocator, tree = self.allocator, self.tree
        leases = Counter(page for h in self.holders for page in h.pages) + Counter(p for pin in self.pins for p in pin)
        assert allocator.ref_counts == [leases[p] for p in range(len(allocator.ref_counts))], "a lease count is wrong"
        free, idle, leased = set(allocator.free_pages), set(tree._evictable), set(leases)
        assert len(free) == len(allocator.free_pages), "a page is free twice"
        assert not free & idle and not free & leased and not idle & leased, "a page is in two states"
        assert free | idle | leased == set(range(1, allocator.num_pages + 1)), "a page was lost"
        assert idle == set(tree._nodes) - leased, "a cached page that nobody leases is not idle"
        walked: set[int] = set()
        for root in tree._top.children.values():
            assert root.children, "an empty root"
            for node in root.children.values():
                self._audit_subtree(node, root.key, b"", walked)
        assert walked == set(tree._nodes), "a cached page is not in the tree"
        self._audit_order()

    def _audit_subtree(self, node: PageNode, root: bytes, prefix: bytes, walked: set[int]) -> None:
        epoch, salt = map(int, root.split(b":"))
        prefix += node.key
        tokens = tuple(int.from_bytes(prefix[i : i + 4], "little") for i in range(0, len(prefix), 4))
        assert self.tree._nodes[node.page] is node and node.page not in walked
        assert self.contents[node.page] == (epoch, salt, tokens), "a page is cached under tokens that it does not hold"
        walked.add(node.page)
        for child in node.children.values():
            assert child.parent is node
            self._audit_subtree(child, root, prefix, walked)

    def _audit_order(self) -> None:
        """Evicting in order of last use takes leaves first, as long as no holder is in between."""
        order = {page: i for i, page in enumerate(self.tree._evictable)}
        for page, at in order.items():
            parent = self.tree._nodes[page].parent
            if parent is not None and parent.page in order:
                assert order[parent.page] > at, "a parent would be evicted before its child"

    def go_home(self) -> None:
        for h in self.holders:
            self.allocator.release(h.pages)
        for pin in self.pins:
            self.allocator.release(pin)
        self.holders, self.pins = [], []
        self.audit()
        assert self.allocator.num_available() == self.allocator.num_pages, "a page did not come home"
