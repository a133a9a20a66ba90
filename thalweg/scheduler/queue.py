"""The queue of requests that wait to be admitted. A policy only orders it."""

from __future__ import annotations

from bisect import insort
from typing import Callable

from thalweg.core.request import Request

Key = tuple[int, int]
Hit = Callable[[Request], int]


def _fcfs(request: Request, hit: Hit) -> Key:
    return 0, request.uid


def _priority(request: Request, hit: Hit) -> Key:
    return -request.priority, request.uid


def _longest_prefix(request: Request, hit: Hit) -> Key:
    return -hit(request), request.uid


POLICIES: dict[str, Callable[[Request, Hit], Key]] = {
    "fcfs": _fcfs,  # in order of arrival
    # the longest prefix in the cache first, so that what is cached is used before it is evicted
    "lpm": _longest_prefix,
    "priority": _priority,  # the larger priority first
}
CHANGING = frozenset({"lpm"})  # policies whose keys change while requests wait


class Queue:
    """Waiting requests in the order of a policy; ties and preempted requests in order of arrival. hit: pages of a
    request's prefix that are in the cache now.
    """

    def __init__(self, policy: str, hit: Hit) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}; there is {', '.join(POLICIES)}")
        rank = POLICIES[policy]
        self._key = lambda request: rank(request, hit)
        self._changing = policy in CHANGING
        self._items: list[Request] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, request: Request) -> None:
        if self._changing:
            self._items.append(request)
        else:
            insort(self._items, request, key=self._key)

    def remove(self, request: Request) -> None:
        self._items.remove(request)

    def order(self) -> list[Request]:
        """The requests in the order in which they should be admitted now."""
        if self._changing:
            self._items.sort(key=self._key)
        return self._items.copy()
