"""A random driver for the page books and the prefix tree, against a model that knows what every page holds."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from thalweg.cache.books import Books
from thalweg.cache.radix import Node, Path, RadixTree
from thalweg.core.plan import NULL_PAGE

Content = tuple[int, int, tuple[int, ...]]  # epoch, salt, the whole prefix up to the page's end


@dataclass(eq=False)
class Holder:
    """A sequence that leases pages; the first `filled` of them have their contents."""

    path: Path
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
        self.books = Books(pages, self.tree)
        self.contents: dict[int, Content] = {}
        self.holders: list[Holder] = []
        self.waiting: list[Path] = []  # matched, but not admitted yet
        self.pins: list[list[int]] = []  # transfers under way: leases without a sequence
        self.count: Counter[str] = Counter()
        self.flush_share = 0.002

    def run(self, operations: int) -> Counter[str]:
        for i in range(operations):
            self.operate()
            assert self.books.spare() == len(self.books.free) + self.tree.idle
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
            self.books.drop(self.pins.pop(self.rng.randrange(len(self.pins))))
            self.count["unpinned"] += 1

    # ---- operations

    def _arrive(self) -> None:
        rng = self.rng
        if self.waiting and rng.random() < 0.5:
            path = self.waiting.pop(rng.randrange(len(self.waiting)))
        else:
            path = Path([rng.randrange(2) for _ in range(rng.randint(1, 8 * self.size))], salt=rng.randrange(2))
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
        self.books.hold(pages)
        need = -(-len(tokens) // self.size) - hit
        if need > self.books.spare():
            self.books.drop(pages)
            self.count["refused"] += 1
            return
        pages += self._take(need)
        self.holders.append(Holder(path, self.tree.epoch, pages, hit))
        self.count["hits" if hit else "misses"] += 1

    def _take(self, need: int) -> list[int]:
        free, idle = len(self.books.free), self.tree.idle
        got = self.books.take(need)
        assert NULL_PAGE not in got and len(set(got)) == need
        if need <= free:
            assert self.tree.idle == idle, "an eviction without need"
        else:
            self.count["evicted"] += idle - self.tree.idle
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
        if need <= self.books.spare():
            h.pages += self._take(need)
            h.path.tokens.extend(more)
            self.count["grown"] += 1

    def _leave(self, h: Holder) -> None:
        if self.rng.random() < 0.7:
            self._fill(h)
        self.books.drop(h.pages)
        self.count["left"] += 1
        if self.rng.random() < 0.3:
            self._trim(h.path)

    def _trim(self, path: Path) -> None:
        """Who has ended takes its own end of the tree with it: only pages that nobody leases or stands behind, and not
        its beginning.
        """
        before, count = set(self.tree._nodes), self.rng.randint(0, len(path.tokens) // self.size)
        leased = {page for page in before if self.books.lease[page]}
        self.books.trim(path, count)
        gone = before - set(self.tree._nodes)
        assert not gone & leased, "a page that somebody leases was trimmed"
        assert all(len(self.contents[page][2]) > count * self.size for page in gone), "trimmed too much"
        left = Path(path.tokens, path.salt)
        depth, node = self.tree.match(left, len(path.tokens) // self.size), left.node
        assert depth <= count or (node is not None and (node.children or node.page in leased)), "trimmed too little"
        self.count["trimmed"] += len(gone)

    def _pin(self, h: Holder) -> None:
        pages = h.pages[: self.rng.randint(1, len(h.pages))]
        self.books.hold(pages)
        self.pins.append(pages)
        self.count["pinned"] += 1

    def _flush(self) -> None:
        self.books.flush()
        assert not self.tree.cached and not self.tree.idle
        self.count["flushed"] += 1

    def _content(self, path: Path, epoch: int, page: int) -> Content:
        return epoch, path.salt, tuple(path.tokens[: (page + 1) * self.size])

    # ---- the audit

    def audit(self) -> None:
        books, tree = self.books, self.tree
        leases = Counter(page for h in self.holders for page in h.pages) + Counter(p for pin in self.pins for p in pin)
        assert books.lease == [leases[p] for p in range(len(books.lease))], "a lease count is wrong"
        free, idle, leased = set(books.free), set(tree._idle), set(leases)
        assert len(free) == len(books.free), "a page is free twice"
        assert not free & idle and not free & leased and not idle & leased, "a page is in two states"
        assert free | idle | leased == set(range(1, books.total + 1)), "a page was lost"
        assert idle == set(tree._nodes) - leased, "a cached page that nobody leases is not idle"
        walked: set[int] = set()
        for root in tree._top.children.values():
            assert root.children, "an empty root"
            for node in root.children.values():
                self._audit_subtree(node, root.key, b"", walked)
        assert walked == set(tree._nodes), "a cached page is not in the tree"
        self._audit_order()

    def _audit_subtree(self, node: Node, root: bytes, prefix: bytes, walked: set[int]) -> None:
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
        order = {page: i for i, page in enumerate(self.tree._idle)}
        for page, at in order.items():
            parent = self.tree._nodes[page].parent
            if parent is not None and parent.page in order:
                assert order[parent.page] > at, "a parent would be evicted before its child"

    def go_home(self) -> None:
        for h in self.holders:
            self.books.drop(h.pages)
        for pin in self.pins:
            self.books.drop(pin)
        self.holders, self.pins = [], []
        self.audit()
        assert self.books.spare() == self.books.total, "a page did not come home"
