"""Whether an engine that owes answers gives signs of life. It speaks at least every quarter of a second while it has
work.
"""

from __future__ import annotations

import time


class Vigil:
    """timeout: seconds of silence, while something is owed, after which the engine counts as wedged; 0 is never. tick:
    how often to look.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.tick = min(1.0, timeout / 4) if timeout else 60.0
        self._owed: set[int] = set()
        self._heard = 0.0

    def owes(self, key: int) -> None:
        """The engine was asked for something; where nothing was owed before, its time begins now."""
        if not self._owed:
            self._heard = time.monotonic()
        self._owed.add(key)

    def paid(self, key: int) -> None:
        """That is answered in full."""
        self._owed.discard(key)

    def heard(self) -> None:
        """The engine spoke."""
        self._heard = time.monotonic()

    def forget(self) -> None:
        """The engine is gone, and what it owed with it."""
        self._owed.clear()

    @property
    def owed(self) -> int:
        return len(self._owed)

    @property
    def overdue(self) -> bool:
        return bool(self.timeout and self._owed) and time.monotonic() - self._heard > self.timeout
