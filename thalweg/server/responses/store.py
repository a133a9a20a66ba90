"""Stored responses: a later request can continue or fetch them. The least recently used make room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec


class ResponseRun(Protocol):
    """The generation of a background response."""

    @property
    def done(self) -> bool: ...

    @property
    def events(self) -> Sequence[bytes] | None:
        """So far, by sequence number; None: they are not kept."""

    def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """The events from this sequence number on, until the last."""

    async def stop(self, reason: str = "") -> None:
        """Ends it as cancelled, or as failed with a reason."""

    def response(self) -> bytes:
        """As JSON."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    messages: Sequence[dict[str, Any]] | None  # the conversation up to this answer, without instructions; None: no end
    items: Sequence[bytes] = ()  # that it was made from, as JSON
    body: bytes = b""  # the response as JSON
    run: ResponseRun | None = None  # of a background response
    extra: int = 0  # bytes of its events

    @property
    def size(self) -> int:
        return self.extra + len(self.body) + len(msgspec.json.encode(self.messages)) + sum(map(len, self.items))

    @property
    def is_running(self) -> bool:
        return self.run is not None and not self.run.done


class ResponseStore:
    """At most `count` responses of together at most `limit` bytes of JSON, conversations included. 0 stores none.

    Responses that still run are not removed.
    """

    def __init__(self, count: int, limit: int) -> None:
        self.count, self.limit = count, limit
        self.size = 0
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()  # with their sizes

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def running(self) -> list[ResponseRun]:
        return [entry.run for entry, _ in self._stored.values() if entry.run is not None and entry.is_running]

    def put(self, id: str, entry: StoredResponse) -> bool:
        """Stores a response, in place of one with this id. False, and nothing changes, if there is no room for it."""
        size = entry.size
        others = {key: old for key, old in self._stored.items() if key != id and old[0].is_running}
        if len(others) >= self.count or size + sum(old for _, old in others.values()) > self.limit:
            return False
        self.remove(id)
        self._stored[id] = entry, size
        self.size += size
        for key in list(self._stored):
            if len(self._stored) <= self.count and self.size <= self.limit:
                break
            if key != id and key not in others:
                self.remove(key)
        return True

    def grow(self, id: str, extra: int) -> bool:
        """Makes room for `extra` more bytes of events. False if there is none."""
        entry = self.get(id)
        return entry is None or self.put(id, replace(entry, extra=entry.extra + extra))

    def get(self, id: str) -> StoredResponse | None:
        """The response, which counts as used."""
        if id not in self._stored:
            return None
        self._stored.move_to_end(id)
        return self._stored[id][0]

    def remove(self, id: str) -> bool:
        entry, size = self._stored.pop(id, (None, 0))
        self.size -= size
        return entry is not None
