"""The prefix cache: a tree with one full page an edge.

An edge is keyed by the page's actual tokens (packed int32, so equality is exact and a hash collision costs time only),
a root by (epoch, salt). A node is one cached page; its path from the root is the whole prefix that the page's contents
depend on, so a match of the path is a hit and anything else is not.

Matching and inserting go on from where a sequence stands (`Path`), so that a step costs what it adds and not what is
there already.

Eviction takes the idle page that was used least recently. A node whose lease has ended is younger than every idle node
below it, so this is a leaf, except below pages that others lease. Then the whole subtree leaves the tree: its leased
pages stay with their holders and are merely cached no more. So every idle page can be had at any moment, and the number
of idle pages is exact.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Iterable, Protocol, Sequence

from thalweg.core.plan import NULL_PAGE

DEAD = -1  # the page of a node that left the tree

Frontier = tuple[
    object, bytes
]  # a node (or root key) and the next page's tokens: who shares it would compute the same page next


class Node:
    """One cached page. page: NULL_PAGE for a root, DEAD once it has left the tree."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, parent: Node | None, key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[bytes, Node] = {}


class Path:
    """Where one sequence stands in the tree: its first `depth` full pages are cached, and `node` is the last of them.

    tokens: all its known tokens; whoever learns more appends them. epoch: that of its last match; what it computes is
    cached in that epoch only.
    """

    __slots__ = ("depth", "epoch", "node", "salt", "tokens")

    def __init__(self, tokens: Iterable[int], salt: int) -> None:
        self.tokens = array("i", tokens)
        self.salt = salt
        self.epoch = -1
        self.node: Node | None = None
        self.depth = 0


class PrefixTree(Protocol):
    """What the books and the scheduler ask of a prefix cache. Pages are counted in full pages from a sequence's
    start.
    """

    page_size: int

    @property
    def idle(self) -> int:
        """Pages that are cached and leased by nobody."""

    @property
    def cached(self) -> int:
        """Pages that are cached, leased or not."""

    def match(self, path: Path, most: int) -> int:
        """How many of the first `most` pages of the path's tokens are cached; `path` then stands there, in the present
        epoch. For sequences that have not begun to compute.
        """

    def pages(self, path: Path) -> list[int]:
        """The cached pages up to where `path` stands."""

    def insert(self, path: Path, pages: Sequence[int], count: int) -> None:
        """Caches the first `count` pages of the path's tokens, which `pages` hold and the caller leases, where they are
        not yet.
        """

    def frontier(self, path: Path) -> Frontier | None:
        """What `path` would match or insert next; None where its next page is not full, or nothing is ever cached."""

    def rest(self, page: int) -> bool:
        """The last lease of `page` has ended: True if it is cached and so becomes idle, False if it is free."""

    def wake(self, page: int) -> None:
        """An idle page is leased again."""

    def evict(self, count: int) -> list[int]:
        """Gives up at least `count` idle pages, which are then free."""

    def trim(self, path: Path, count: int) -> list[int]:
        """Gives up the cached pages of the path's tokens beyond the first `count`, from the last one on, as far as they
        are idle and nothing stands behind them; they are then free. For sequences that compute no more.
        """

    def flush(self) -> list[int]:
        """Forgets everything and begins a new epoch; returns the idle pages, which are then free."""


class RadixTree:
    """The prefix cache (see the module's text). `page_size` in tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.epoch = 0
        self._top = Node(None, b"", NULL_PAGE)  # its children are the roots
        self._nodes: dict[int, Node] = {}  # page -> its node
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def cached(self) -> int:
        return len(self._nodes)

    def match(self, path: Path, most: int) -> int:
        if path.epoch != self.epoch:
            path.epoch, path.node, path.depth = self.epoch, None, 0
        node, depth = self._resume(path)
        while node is not None and depth < most:
            child = node.children.get(self._key(path, depth))
            if child is None:
                break
            node, depth = child, depth + 1
        path.node, path.depth = node, depth
        return depth

    def pages(self, path: Path) -> list[int]:
        found: list[int] = []
        node = path.node
        while node is not None and node.page != NULL_PAGE:
            found.append(node.page)
            node = node.parent
        found.reverse()
        return found

    def insert(self, path: Path, pages: Sequence[int], count: int) -> None:
        if not count or path.epoch != self.epoch:  # computed before a flush: nobody may find it after
            return
        node, depth = self._resume(path)
        if node is None:
            key = self._root_key(path)
            node = self._top.children[key] = Node(self._top, key, NULL_PAGE)
        while depth < count:
            key = self._key(path, depth)
            child = node.children.get(key)
            if child is None:
                page = pages[depth]
                assert page not in self._nodes, f"page {page} is cached already, under other tokens"
                child = node.children[key] = self._nodes[page] = Node(node, key, page)
            node, depth = child, depth + 1
        path.node, path.depth = node, depth

    def frontier(self, path: Path) -> Frontier | None:
        node, depth = self._resume(path)
        if (depth + 1) * self.page_size > len(path.tokens):
            return None
        return node or self._root_key(path), self._key(path, depth)

    def rest(self, page: int) -> bool:
        node = self._nodes.get(page)
        if node is None:
            return False
        idle = self._idle
        idle[page] = None
        parent = node.parent
        while (
            parent is not None and parent.page in idle
        ):  # older than its child: it was computed twice and the other holder left first
            idle.move_to_end(parent.page)
            parent = parent.parent
        return True

    def wake(self, page: int) -> None:
        del self._idle[page]

    def evict(self, count: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < count:
            self._detach(self._nodes[next(iter(self._idle))], freed)
        return freed

    def trim(self, path: Path, count: int) -> list[int]:
        freed: list[int] = []
        depth, node = self.match(path, len(path.tokens) // self.page_size), path.node
        while node is not None and depth > count and node.page in self._idle and not node.children:
            last, node, depth = node, node.parent, depth - 1
            self._detach(last, freed)
        return freed

    def flush(self) -> list[int]:
        freed: list[int] = []
        for root in list(self._top.children.values()):
            self._detach(root, freed)
        self.epoch += 1
        return freed

    def _key(self, path: Path, depth: int) -> bytes:
        size = self.page_size
        return path.tokens[depth * size : (depth + 1) * size].tobytes()

    def _root_key(self, path: Path) -> bytes:
        return b"%d:%d" % (path.epoch, path.salt)

    def _resume(self, path: Path) -> tuple[Node | None, int]:
        """Where `path` stands, or the root if what it stood on was evicted; None if there is not even a root."""
        if path.node is not None and path.node.page != DEAD:
            return path.node, path.depth
        return self._top.children.get(self._root_key(path)), 0

    def _detach(self, node: Node, freed: list[int]) -> None:
        """Takes a subtree out of the tree; its idle pages are appended to `freed`."""
        parent = node.parent
        assert parent is not None, "the top never leaves"
        del parent.children[node.key]
        leaving = [node]
        while leaving:
            node = leaving.pop()
            if self._nodes.pop(node.page, None) is not None and node.page in self._idle:
                del self._idle[node.page]
                freed.append(node.page)
            node.page = DEAD
            leaving.extend(node.children.values())
            node.children.clear()
        if parent.page == NULL_PAGE and parent.parent is not None and not parent.children:
            del self._top.children[parent.key]  # salts come and go: an empty root goes too
            parent.page = DEAD


class NoTree:
    """Off is a value: a prefix cache that never hits."""

    idle = 0
    cached = 0

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def match(self, path: Path, most: int) -> int:
        return 0

    def pages(self, path: Path) -> list[int]:
        return []

    def insert(self, path: Path, pages: Sequence[int], count: int) -> None:
        return

    def frontier(self, path: Path) -> Frontier | None:
        return None

    def rest(self, page: int) -> bool:
        return False

    def wake(self, page: int) -> None:
        raise AssertionError(f"page {page} is not idle: without a prefix cache no page ever is")

    def evict(self, count: int) -> list[int]:
        raise AssertionError(f"{count} more pages than there are: the caller must ask spare() first")

    def trim(self, path: Path, count: int) -> list[int]:
        return []

    def flush(self) -> list[int]:
        return []
