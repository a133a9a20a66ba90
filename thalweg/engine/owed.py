"""What the data-parallel ranks of an engine owe their client, and how long each has been silent."""

from __future__ import annotations

import time
from collections import defaultdict


class OwedReplies:
    """Replies by key: the uid of a sequence, or less than 0 for a control message."""

    def __init__(self) -> None:
        self._by_rank: dict[int, set[int]] = defaultdict(set)
        self._last: dict[int, float] = {}  # time.monotonic() of a rank's last message, or of what it then owed first

    def add(self, rank: int, key: int) -> None:
        if not self._by_rank[rank]:
            self._last[rank] = time.monotonic()
        self._by_rank[rank].add(key)

    def discard(self, key: int) -> None:
        for keys in self._by_rank.values():
            keys.discard(key)

    def clear(self) -> None:
        self._by_rank.clear()

    def hear(self, rank: int) -> None:
        """A message has come from this rank."""
        self._last[rank] = time.monotonic()

    def silent(self, seconds: float) -> list[int]:
        """The ranks that owe something and have sent nothing for so long."""
        before = time.monotonic() - seconds
        return [rank for rank, keys in self._by_rank.items() if keys and self._last[rank] < before]

    def of(self, ranks: list[int]) -> int:
        """How many replies these ranks owe."""
        return sum(len(self._by_rank[rank]) for rank in ranks)
