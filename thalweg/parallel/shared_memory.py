"""Memory that processes of one host share, and pipes that wake them.

Both are file descriptors, which multiprocessing hands to another process. They have no name, so nothing is left behind
when processes are killed.
"""

from __future__ import annotations

import mmap
import os
import select
import tempfile
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

SHM = Path("/dev/shm")  # memory as a file system, on Linux
SPIN_S = 50e-6  # how long a waiting process polls before it sleeps
LONGEST_SLEEP_S = 1.0


class SharedMemory:
    """Bytes that a process and those that it spawns share, zeros at first."""

    def __init__(self, size: int) -> None:
        with tempfile.TemporaryFile(dir=SHM if SHM.is_dir() else None) as file:
            file.truncate(size)
            self._map(os.dup(file.fileno()), size)

    def _map(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.bytes = memoryview(mmap.mmap(descriptor, size))
        self.words = self.bytes.cast("q")  # a write to an entry is one store, so no process reads half of it

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (DupFd(self.descriptor), self.size)

    def __del__(self) -> None:
        os.close(self.descriptor)


def _attach(descriptor: Any, size: int) -> SharedMemory:
    memory = SharedMemory.__new__(SharedMemory)
    memory._map(descriptor.detach(), size)
    return memory


class WakePipe:
    """Wakes one process. A call that finds it awake is kept, so none is missed; several may become one."""

    def __init__(self) -> None:
        self._adopt(*os.pipe())

    def _adopt(self, receives: int, sends: int) -> None:
        self.receives, self._sends = receives, sends  # `receives` is readable once woken
        os.set_blocking(receives, False)
        os.set_blocking(sends, False)

    def wake(self) -> None:
        try:
            os.write(self._sends, b"\0")
        except BlockingIOError:
            return  # the pipe is full of calls

    def clear(self) -> None:
        """Forgets the calls so far."""
        try:
            while len(os.read(self.receives, 4096)) == 4096:
                pass
        except BlockingIOError:
            return

    def wait(self, is_ready: Callable[[], bool], deadline: float) -> bool:
        """Polls `is_ready` for a moment, then after each call, until it is true. Returns False at the deadline, a
        time.monotonic().
        """
        spin_end = time.perf_counter() + SPIN_S
        while not is_ready():
            if time.perf_counter() < spin_end:
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.sleep(min(left, LONGEST_SLEEP_S))
        return True

    def sleep(self, timeout: float) -> None:
        """Returns when woken, or after `timeout` seconds. Clears the pipe: the caller looks at what has changed."""
        select.select([self.receives], [], [], timeout)
        self.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_wake_pipe, (DupFd(self.receives), DupFd(self._sends))

    def __del__(self) -> None:
        os.close(self.receives)
        os.close(self._sends)


def _attach_wake_pipe(receives: Any, sends: Any) -> WakePipe:
    wake_pipe = WakePipe.__new__(WakePipe)
    wake_pipe._adopt(receives.detach(), sends.detach())
    return wake_pipe
