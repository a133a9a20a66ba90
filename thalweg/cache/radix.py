"""The prefix cache: a radix tree with one full page per edge.

An edge is keyed by the page's tokens (packed int32, so equality is exact), a root by (epoch, salt). The path from the
root to a node is the whole prefix that the page's KV depends on. Matching and inserting continue from the cursor of a
sequence, so a step costs what it adds.

Eviction takes the least recently used evictable page. Releasing a sequence marks its pages from the last one back, so
that page is a leaf, unless others use pages below it. Then the whole subtree leaves the tree: pages in use stay with
their users and are cached no more. So every evictable page can be had at any moment.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Iterable, Iterator, Sequence

from thalweg.core.plan import NULL_PAGE, TokenLogprob

DETACHED = -1  # page of a node that has left the tree

MissingPage = tuple[object, bytes]  # (node or root key, tokens of the next page): equal for sequences that share it


class PageNode:
    """One cached page."""

    __slots__ = ("children", "key", "logprobs", "page", "parent")

    def __init__(self, parent: PageNode | None, key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page  # NULL_PAGE: a root; DETACHED: it has left the tree
        self.children: dict[bytes, PageNode] = {}
        self.logprobs: tuple[TokenLogprob, ...] = ()  # see `PromptLogprobs`


class PrefixCursor:
    """Position of one sequence in the tree: `node` is the last of its first `depth` full pages, which are cached."""

    __slots__ = ("depth", "epoch", "node", "salt", "tokens")

    def __init__(self, tokens: Iterable[int], salt: int) -> None:
        self.tokens = array("i", tokens)  # all known tokens; the owner appends new ones
        self.salt = salt
        self.epoch = -1  # of the last match: the sequence's pages are cached in this epoch only
        self.node: PageNode | None = None
        self.depth = 0


class RadixTree:
    """The prefix cache of one page allocator."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size  # tokens
        self.epoch = 0  # increased by `flush`
        self._top = PageNode(None, b"", NULL_PAGE)  # its children are the roots
        self._nodes: dict[int, PageNode] = {}  # by page
        self._evictable: OrderedDict[int, None] = OrderedDict()  # pages, least recently used first

    @property
    def num_evictable(self) -> int:
        """Cached pages that nobody uses."""
        return len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Cached pages, in use or not."""
        return len(self._nodes)

    def match(self, cursor: PrefixCursor, max_pages: int) -> int:
        """Moves the cursor of a sequence that has computed nothing yet to its last cached page.

        Returns the number of cached pages, at most `max_pages`.
        """
        if cursor.epoch != self.epoch:
            cursor.epoch, cursor.node, cursor.depth = self.epoch, None, 0
        node, depth = self._resume(cursor)
        while node is not None and depth < max_pages:
            child = node.children.get(self._key(cursor, depth))
            if child is None:
                break
            node, depth = child, depth + 1
        cursor.node, cursor.depth = node, depth
        return depth

    def pages(self, cursor: PrefixCursor) -> list[int]:
        """Cached pages up to the cursor."""
        pages: list[int] = []
        node = cursor.node
        while node is not None and node.page != NULL_PAGE:
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages

    def cached(self, cursor: PrefixCursor) -> Iterator[PageNode]:
        """All cached pages of the sequence, the first one first. The cursor stays."""
        node, depth = self._top.children.get(self._root_key(cursor)), 0
        while node is not None and (node := node.children.get(self._key(cursor, depth))) is not None:
            yield node
            depth += 1

    def insert(self, cursor: PrefixCursor, pages: Sequence[int], count: int) -> None:
        """Caches the first `count` pages of a sequence that uses `pages`."""
        if not count or cursor.epoch != self.epoch:  # computed before a flush: nobody may hit it
            return
        node, depth = self._resume(cursor)
        if node is None:
            key = self._root_key(cursor)
            node = self._top.children[key] = PageNode(self._top, key, NULL_PAGE)
        while depth < count:
            key = self._key(cursor, depth)
            child = node.children.get(key)
            if child is None:
                page = pages[depth]
                assert page not in self._nodes, f"page {page} is cached already, under other tokens"
                child = node.children[key] = self._nodes[page] = PageNode(node, key, page)
            node, depth = child, depth + 1
        cursor.node, cursor.depth = node, depth

    def next_missing_page(self, cursor: PrefixCursor) -> MissingPage | None:
        """The page that the sequence would match or insert next; None if that page is not full."""
        node, depth = self._resume(cursor)
        if (depth + 1) * self.page_size > len(cursor.tokens):
            return None
        return node or self._root_key(cursor), self._key(cursor, depth)

    def drop_logprobs(self) -> None:
        for node in self._nodes.values():
            node.logprobs = ()

    def mark_evictable(self, page: int) -> bool:
        """The last reference to `page` was dropped. Returns False if the page is not cached."""
        node = self._nodes.get(page)
        if node is None:
            return False
        evictable = self._evictable
        evictable[page] = None
        parent = node.parent
        # a parent may be evictable already if the page was computed twice; keep it behind its children
        while parent is not None and parent.page in evictable:
            evictable.move_to_end(parent.page)
            parent = parent.parent
        return True

    def mark_in_use(self, page: int) -> None:
        """An evictable page has a user again."""
        del self._evictable[page]

    def evict(self, count: int) -> list[int]:
        """Evicts at least `count` pages and returns them."""
        freed: list[int] = []
        while len(freed) < count:
            self._detach(self._nodes[next(iter(self._evictable))], freed)
        return freed

    def evict_tail(self, cursor: PrefixCursor, keep: int) -> list[int]:
        """Evicts the pages of an ended sequence beyond its first `keep`, from the last one back.

        Stops at the first page that is in use or has children. Returns the evicted pages.
        """
        freed: list[int] = []
        depth, node = self.match(cursor, len(cursor.tokens) // self.page_size), cursor.node
        while node is not None and depth > keep and node.page in self._evictable and not node.children:
            last, node, depth = node, node.parent, depth - 1
            self._detach(last, freed)
        return freed

    def flush(self) -> list[int]:
        """Forgets everything and begins a new epoch. Returns the pages that were evictable."""
        freed: list[int] = []
        for root in list(self._top.children.values()):
            self._detach(root, freed)
        self.epoch += 1
        return freed

    def _key(self, cursor: PrefixCursor, depth: int) -> bytes:
        size = self.page_size
        return cursor.tokens[depth * size : (depth + 1) * size].tobytes()

    def _root_key(self, cursor: PrefixCursor) -> bytes:
        return b"%d:%d" % (cursor.epoch, cursor.salt)

    def _resume(self, cursor: PrefixCursor) -> tuple[PageNode | None, int]:
        """Node and depth of the cursor; the root if its node was evicted; None if there is no root."""
        if cursor.node is not None and cursor.node.page != DETACHED:
            return cursor.node, cursor.depth
        return self._top.children.get(self._root_key(cursor)), 0

    def _detach(self, node: PageNode, freed: list[int]) -> None:
        """Removes a subtree and appends its evictable pages to `freed`."""
        parent = node.parent
        assert parent is not None, "the top node stays"
        del parent.children[node.key]
        leaving = [node]
        while leaving:
            node = leaving.pop()
            if self._nodes.pop(node.page, None) is not None and node.page in self._evictable:
                del self._evictable[node.page]
                freed.append(node.page)
            node.page = DETACHED
            leaving.extend(node.children.values())
            node.children.clear()
        if parent.page == NULL_PAGE and parent.parent is not None and not parent.children:
            del self._top.children[parent.key]  # an empty root leaves too, or unused salts would pile up
            parent.page = DETACHED


class NoPrefixCache(RadixTree):
    """Null object: caches nothing, so it never hits."""

    def insert(self, cursor: PrefixCursor, pages: Sequence[int], count: int) -> None:
        return

    def next_missing_page(self, cursor: PrefixCursor) -> MissingPage | None:
        return None
