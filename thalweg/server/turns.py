"""Bounds how many requests start in one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 4


class TurnLimit:
    """Starts PER_TURN requests in each turn of the event loop, in their order of arrival.

    Parsing, rendering and tokenizing a request takes some 0.3 ms. Starting a whole burst in one turn would delay the
    tokens of running streams by that for each request; this way a token waits for PER_TURN requests at most.
    """

    def __init__(self) -> None:
        self._queue: deque[asyncio.Future[None]] = deque()
        self._free = PER_TURN  # in this turn
        self._scheduled = False  # the next turn

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next_turn)
        if self._free and not self._queue:
            self._free -= 1
            return
        turn = loop.create_future()
        self._queue.append(turn)
        await turn

    def _next_turn(self) -> None:
        self._free = PER_TURN
        while self._free and self._queue:
            turn = self._queue.popleft()
            if not turn.done():  # else cancelled
                turn.set_result(None)
                self._free -= 1
        self._scheduled = bool(self._queue) or self._free < PER_TURN
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next_turn)
