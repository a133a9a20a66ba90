"""Watchdogs: one in the engine process records steps when its loop is stuck, one in the client notices silence."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time

from thalweg.engine.loop import Loop
from thalweg.engine.recording import StepRecorder

log = logging.getLogger("thalweg.watchdog")
SIGNAL = signal.SIGUSR1  # asks for a recording
TICK = 0.5  # seconds between two looks at the loop, and at most a quarter of the timeout


def watch(loop: Loop, timeout: float) -> None:
    """Starts the engine's watchdog thread if steps are recorded. Call it on the main thread, before the loop runs.

    timeout: seconds without a turn, while there is work, after which the loop counts as stuck; 0: never.
    """
    if loop.recorder is None:
        signal.signal(SIGNAL, signal.SIG_IGN)
        return
    # the signal wakes the thread through a pipe, even while the main thread does not return from a library
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    signal.signal(SIGNAL, lambda number, frame: None)
    threading.Thread(target=_watch, args=(loop, loop.recorder, timeout, reads), name="watchdog", daemon=True).start()


def _watch(loop: Loop, recorder: StepRecorder, timeout: float, reads: int) -> None:
    """Runs until the other end of the pipe is closed."""
    tick = min(TICK, timeout / 4) if timeout else TICK
    turns, since, is_saved = -1, time.monotonic(), False
    while True:
        if select.select([reads], [], [], tick)[0]:
            signals = os.read(reads, 4096)
            if not signals:
                return
            if SIGNAL in signals:
                recorder.save("asked for by a signal")
        if loop.turns != turns or loop.scheduler.is_idle:
            turns, since, is_saved = loop.turns, time.monotonic(), False
        elif timeout and not is_saved and time.monotonic() - since > timeout:
            is_saved = True
            reason = f"no step for {timeout:g} s while {len(loop.scheduler.requests)} requests wait"
            log.error("%s", reason)
            recorder.save(reason)


class ReplyWatchdog:
    """Notices when an engine that owes replies is silent. While it has work it sends at least every 0.25 s."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout  # seconds of silence after which the engine counts as stuck; 0: never
        self.tick = min(1.0, timeout / 4) if timeout else 60.0  # seconds between two looks
        self._open: set[int] = set()
        self._last_message = 0.0

    def expect(self, key: int) -> None:
        """The engine owes a reply to `key`."""
        if not self._open:
            self._last_message = time.monotonic()
        self._open.add(key)

    def finish(self, key: int) -> None:
        """The reply to `key` is complete."""
        self._open.discard(key)

    def reset(self) -> None:
        """The engine has sent a message."""
        self._last_message = time.monotonic()

    def clear(self) -> None:
        """The engine is gone, with all replies that it owed."""
        self._open.clear()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_overdue(self) -> bool:
        return bool(self.timeout and self._open) and time.monotonic() - self._last_message > self.timeout
