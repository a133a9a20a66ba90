"""Where the news of one request wait for its stream."""

from __future__ import annotations

import asyncio

from thalweg.core.messages import TokenDelta


class Inbox:
    """What the engine said of one request and its stream has not taken yet: for each sequence one delta, so that a
    stream which falls behind gets more tokens at once, not more wake-ups, and a reader that never reads costs one delta
    a sequence.
    """

    __slots__ = ("deltas", "error", "waiter")

    def __init__(self) -> None:
        self.deltas: dict[int, tuple[TokenDelta, float]] = {}
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta, at: float) -> None:
        held = self.deltas.get(delta.uid)
        self.deltas[delta.uid] = (delta, at) if held is None else (held[0].merge(delta), held[1])
        self._wake()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._wake()

    async def take(self) -> list[tuple[TokenDelta, float]]:
        """All there is, in order of arrival; waits for the first. Raises the error with which the engine failed the
        request.
        """
        while not self.deltas:
            if self.error is not None:
                raise self.error
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        taken, self.deltas = list(self.deltas.values()), {}
        return taken

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
