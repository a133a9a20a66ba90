"""Simulated time: a heap of events."""

from __future__ import annotations

import heapq
import itertools
from typing import Callable


class Clock:
    def __init__(self) -> None:
        self.now = 0
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.ids = itertools.count()

    def after(self, delay: int, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.ids), event))

    def tick(self) -> None:
        self.now, _, event = heapq.heappop(self.events)
        event()

    def spend(self, time: int) -> None:
        """The host works; the devices go on meanwhile."""
        until = self.now + time
        while self.events and self.events[0][0] <= until:
            self.tick()
        self.now = until

    def wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            assert self.events, "deadlock: waiting for what nobody will do"
            self.tick()
