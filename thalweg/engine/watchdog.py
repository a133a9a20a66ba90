"""Watches an engine's loop from a thread of its own: writes the recording when the loop makes no step any more, and
when it is asked to.

The signal's byte comes through the wakeup descriptor, which is written to even while the loop's thread does not come
back from a library.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from types import FrameType

from thalweg.engine.loop import Loop
from thalweg.engine.recording import Ring

log = logging.getLogger("thalweg.sentry")
SIGNAL = signal.SIGUSR1
TICK = 0.5  # seconds between two looks at the loop, and no more than a quarter of the timeout


def watch(loop: Loop, timeout: float) -> None:
    """Called on the main thread, before the loop runs. timeout: seconds without a turn, while there is work, after
    which it counts as wedged; 0 is never. Where nothing is recorded there is nothing to write: the signal is
    ignored.
    """
    ring = loop.recorder
    if not isinstance(ring, Ring):
        signal.signal(SIGNAL, signal.SIG_IGN)
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    signal.signal(SIGNAL, _heard)
    threading.Thread(target=_watch, args=(loop, ring, timeout, reads), name="sentry", daemon=True).start()


def _heard(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor has told the thread."""


def _watch(loop: Loop, ring: Ring, timeout: float, reads: int) -> None:
    """Until the descriptor is closed at its other end."""
    tick = min(TICK, timeout / 4) if timeout else TICK
    turns, since, told = -1, time.monotonic(), False
    while True:
        if select.select([reads], [], [], tick)[0]:
            heard = os.read(reads, 4096)
            if not heard:
                return
            if SIGNAL in heard:
                ring.save("asked for by a signal")
        if loop.turns != turns or loop.scheduler.is_idle:
            turns, since, told = loop.turns, time.monotonic(), False
        elif timeout and not told and time.monotonic() - since > timeout:
            told = True
            log.error("no step for %.0f s while %d requests wait", timeout, len(loop.scheduler.requests))
            ring.save(f"no step for {timeout:g} s while {len(loop.scheduler.requests)} requests wait")


class ReplyWatchdog:
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
