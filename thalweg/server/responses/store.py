"""Stored responses: a later request can continue or fetch them. The least recently used make room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec


class StoredResponse(NamedTuple):
    messages: Sequence[dict[str, Any]]  # the conversation with this answer at its end, without instructions
    body: bytes  # the response as JSON
    size: int


class ResponseStore:
    """At most `count` responses of together at most `limit` bytes of JSON, conversations included. 0 stores none."""

    def __init__(self, count: int, limit: int) -> None:
        self.count, self.limit = count, limit
        self.size = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, id: str, messages: Sequence[dict[str, Any]], body: bytes) -> None:
        """Stores a response, unless it alone is too large."""
        response = StoredResponse(messages, body, len(body) + len(msgspec.json.encode(messages)))
        if response.size > self.limit:
            return
        self._stored[id] = response
        self.size += response.size
        while len(self._stored) > self.count or self.size > self.limit:
            self.size -= self._stored.popitem(last=False)[1].size

    def get(self, id: str) -> StoredResponse | None:
        """The response, which counts as used."""
        if id in self._stored:
            self._stored.move_to_end(id)
        return self._stored.get(id)

    def remove(self, id: str) -> bool:
        response = self._stored.pop(id, None)
        self.size -= 0 if response is None else response.size
        return response is not None
