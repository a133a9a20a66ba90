"""The outermost layer: when many requests come at the same moment, a few of them begin in each turn of the event loop.

Reading, rendering and tokenizing a request takes some 0.3 ms. All of a burst in one turn would hold up the tokens of
whoever streams for as many times that; like this, a token waits for PER_TURN requests at most, and the burst takes
hardly longer as a whole.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

PER_TURN = 4


class ConcurrencyLimit:
    """Lets PER_TURN requests in each turn, in their order of arrival."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._queue: deque[asyncio.Future[None]] = deque()
        self._room = PER_TURN  # of this turn
        self._turning = False  # the next turn is arranged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._enter()
        await self._app(scope, receive, send)

    async def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn)
        if self._room and not self._queue:
            self._room -= 1
            return
        place = loop.create_future()
        self._queue.append(place)
        await place

    def _turn(self) -> None:
        """A turn later: as many of those that wait are let in, and what they leave is room for those that come."""
        self._room = PER_TURN
        while self._room and self._queue:
            place = self._queue.popleft()
            if not place.done():  # cancelled
                place.set_result(None)
                self._room -= 1
        self._turning = bool(self._queue) or self._room < PER_TURN
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
