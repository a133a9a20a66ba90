"""Log-probabilities of prompts, kept with the pages of the prefix cache.

A request for the log-probabilities of its prompt can use a cached page only if those of the page's tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.cache.radix import PrefixCursor, RadixTree
from thalweg.core.plan import TokenLogprob, requested_logprobs


class PromptLogprobs:
    """Reads and writes `PageNode.logprobs`. A page takes them along when it is evicted."""

    def __init__(self, tree: RadixTree) -> None:
        self.tree, self.page_size = tree, tree.page_size
        self.computing: set[int] = set()  # uids of requests that compute some with the present weights

    def find(self, uid: int, cursor: PrefixCursor, top_k: int) -> list[TokenLogprob]:
        """Those of the sequence's tokens, from the second on, as far as they are kept with `top_k` alternatives."""
        found: list[TokenLogprob] = []
        for node in self.tree.cached(cursor):
            if not node.logprobs or len(node.logprobs[0].top_ids) < top_k:
                break
            found += requested_logprobs(node.logprobs, top_k)
        self.computing.add(uid)
        return found

    def keep(self, uid: int, cursor: PrefixCursor, logprobs: Sequence[TokenLogprob]) -> None:
        """Keeps the log-probabilities of a sequence, from its second token on. Those of two sets of weights are not."""
        for depth, node in enumerate(self.tree.cached(cursor) if uid in self.computing else ()):
            page = tuple(logprobs[max(depth * self.page_size - 1, 0) : (depth + 1) * self.page_size - 1])
            if len(page) < self.page_size - (depth == 0):
                break
            if not node.logprobs or len(node.logprobs[0].top_ids) < len(page[0].top_ids):
                node.logprobs = page
        self.computing.discard(uid)

    def drop(self) -> None:
        """The weights have changed."""
        self.computing.clear()
        self.tree.drop_logprobs()
