"""Which data-parallel rank computes a request: the one with the least work.

The client keeps the books itself, so that a burst of requests is spread before any engine reports: it counts the tokens
of each rank's sequences, prompt and output, without what the rank has in its prefix cache. What is cached it estimates:
it remembers the pages of the prompts that it has sent to each rank, the latest ones, as many as the rank has pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from thalweg.core.messages import Submit, TokenDelta


@dataclass(slots=True)
class _RankLoad:
    work: int = 0  # tokens of its sequences
    pages: OrderedDict[int, None] = field(default_factory=OrderedDict)  # keys of prompt pages, the latest last


@dataclass(slots=True)
class _Sequence:
    rank: int
    work: int


class RequestRouter:
    """Chooses ranks, and follows their sequences by what the engine says of them."""

    def __init__(self, ranks: int, pages: int, page_size: int) -> None:
        """pages: of the prefix cache of a rank, of `page_size` tokens each."""
        self.ranks, self.pages, self.page_size = [_RankLoad() for _ in range(ranks)], pages, page_size
        self._sequences: dict[int, _Sequence] = {}  # by uid

    def route(self, message: Submit) -> int:
        """The rank of a new sequence. A sibling goes to the rank that computes the shared prompt."""
        if len(self.ranks) == 1:
            return 0
        size, keys = self.page_size, page_keys(message.prompt, message.salt, self.page_size)
        work = [len(message.prompt) - size * _num_hits(rank.pages, keys) for rank in self.ranks]
        sibling = self._sequences.get(message.sibling)
        number = min(range(len(work)), key=lambda i: self.ranks[i].work + work[i]) if sibling is None else sibling.rank
        rank = self.ranks[number]
        rank.work += work[number]
        self._sequences[message.uid] = _Sequence(number, work[number])
        for key in keys:
            rank.pages[key] = None
            rank.pages.move_to_end(key)
        while len(rank.pages) > self.pages:
            rank.pages.popitem(last=False)
        return number

    def follow(self, delta: TokenDelta) -> None:
        """Counts the new tokens of a sequence, or its end."""
        sequence = self._sequences.get(delta.uid)
        if sequence is None:
            return
        if delta.finish:
            self.forget(delta.uid)
        else:
            sequence.work += len(delta.tokens)
            self.ranks[sequence.rank].work += len(delta.tokens)

    def forget(self, uid: int) -> None:
        """The sequence has ended."""
        if (sequence := self._sequences.pop(uid, None)) is not None:
            self.ranks[sequence.rank].work -= sequence.work

    def by_rank(self, uids: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """The sequences of each rank; those that have ended are nowhere."""
        found: dict[int, tuple[int, ...]] = {}
        for uid in uids:
            sequence = self._sequences.get(uid)
            if sequence is not None or len(self.ranks) == 1:
                number = 0 if sequence is None else sequence.rank
                found[number] = (*found.get(number, ()), uid)
        return found

    def flush(self) -> None:
        """The prefix caches are empty."""
        for rank in self.ranks:
            rank.pages.clear()


def page_keys(prompt: Sequence[int], salt: int, page_size: int) -> list[int]:
    """A key for each full page of a prompt, of the page and all before it."""
    keys, key = list[int](), salt
    for first in range(0, len(prompt) - page_size, page_size):
        key = hash((key, prompt[first : first + page_size]))
        keys.append(key)
    return keys


def _num_hits(pages: OrderedDict[int, None], keys: Sequence[int]) -> int:
    return next((i for i, key in enumerate(keys) if key not in pages), len(keys))
