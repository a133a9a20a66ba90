"""Responses that are kept so that a later request can go on from them, or fetch them: as many as fit, the latest used
stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """messages: the conversation with this answer at its end, instructions left out. body: the response as JSON."""

    messages: Sequence[dict[str, Any]]
    body: bytes
    size: int


class ResponseStore:
    """At most `count` responses that together take at most `limit` bytes of JSON, conversations included. 0 keeps
    none.
    """

    def __init__(self, count: int, limit: int) -> None:
        self.count, self.limit = count, limit
        self.size = 0
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, id: str, messages: Sequence[dict[str, Any]], body: bytes) -> None:
        """Keeps a response; one that alone is too large is not kept."""
        kept = StoredResponse(messages, body, len(body) + len(msgspec.json.encode(messages)))
        if kept.size > self.limit:
            return
        self._kept[id] = kept
        self.size += kept.size
        while len(self._kept) > self.count or self.size > self.limit:
            self.size -= self._kept.popitem(last=False)[1].size

    def get(self, id: str) -> StoredResponse | None:
        """The response, which counts as used."""
        if id in self._kept:
            self._kept.move_to_end(id)
        return self._kept.get(id)

    def remove(self, id: str) -> bool:
        kept = self._kept.pop(id, None)
        if kept is None:
            return False
        self.size -= kept.size
        return True
