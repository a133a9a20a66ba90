"""Sends at their times: a queue of moments that is looked at whenever the client has read a piece, not only between
turns of the event loop.

A turn of the loop handles all sockets that are ready, and with many streams that takes longer than a send may be late.
So each piece that arrives first asks `poll`, which is one comparison unless something is due.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

SWITCH_SECONDS = (
    0.0005  # a thread that draws a progress bar gives way after this; Python's default is ten times as long
)
EARLY_SECONDS = 0.001  # the kernel's timer is exact to a millisecond: the last one is waited for without sleeping
NICE = (
    -10
)  # of the client where it may: beside a server that takes all cores, one of nice 0 is woken several milliseconds late


class Pacer:
    """`at(due, call)` calls `call(now)` at `due` (both time.perf_counter()), from the event loop's thread."""

    def __init__(self) -> None:
        self.next = math.inf
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None

    def at(self, due: float, call: Callable[[float], None]) -> None:
        """Calls it at once where `due` has passed."""
        now = time.perf_counter()
        if due <= now:
            call(now)
            return
        heapq.heappush(self._heap, (due, next(self._numbers), call))
        if due < self.next:
            self._arm()

    def poll(self, now: float) -> None:
        """Makes the calls that are due."""
        while self.next <= now:
            _, _, call = heapq.heappop(self._heap)
            self.next = self._heap[0][0] if self._heap else math.inf
            call(now)
            now = time.perf_counter()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self.next = self._heap[0][0] if self._heap else math.inf
        if self._heap:
            loop, wait = asyncio.get_running_loop(), self.next - time.perf_counter() - EARLY_SECONDS
            self._timer = loop.call_later(max(wait, 0.0), self._wake)

    def _wake(self) -> None:
        self.poll(time.perf_counter())
        self._arm()


@contextmanager
def punctual() -> Iterator[None]:
    """In here threads of this process (progress bars) hold up this one for half a millisecond at most, and other
    processes less than usual, where this user may raise a priority; one that was lowered on purpose (`nice`) stays as
    it is.
    """
    before, nice = sys.getswitchinterval(), os.getpriority(os.PRIO_PROCESS, 0)
    sys.setswitchinterval(SWITCH_SECONDS)
    if nice <= 0:  # who started it under `nice` wants it to step back
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, min(nice, NICE))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        if nice <= 0:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
