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
FIRST_SLEEP_S = 0.001  # a process that is not called, because it polled just before, looks again after this
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
    """Wakes one process. A call that finds it awake is kept, so none is missed; several may become one. While it polls
    in `wait`, nothing is written to the pipe: a call of the system takes longer than all else that ranks do to agree.
    """

    def __init__(self) -> None:
        self._adopt(*os.pipe(), SharedMemory(8))

    def _adopt(self, receives: int, sends: int, memory: SharedMemory) -> None:
        self.receives, self._sends = receives, sends  # `receives` is readable once woken
        self._memory, self._polls = memory, memory.words  # 1 while the process polls
        os.set_blocking(receives, False)
        os.set_blocking(sends, False)

    def wake(self) -> None:
        if self._polls[0]:
            return
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
        if self._poll(is_ready):
            return True
        longest = FIRST_SLEEP_S
        while not is_ready():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.sleep(min(left, longest))
            longest = LONGEST_SLEEP_S
        return True

    def _poll(self, is_ready: Callable[[], bool]) -> bool:
        self._polls[0], spin_end = 1, time.perf_counter() + SPIN_S
        try:
            while not (ready := is_ready()) and time.perf_counter() < spin_end:
                pass
            return ready
        finally:
            self._polls[0] = 0

    def sleep(self, timeout: float) -> None:
        """Returns when woken, or after `timeout` seconds. Clears the pipe: the caller looks at what has changed."""
        select.select([self.receives], [], [], timeout)
        self.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_wake_pipe, (DupFd(self.receives), DupFd(self._sends), self._memory)

    def __del__(self) -> None:
        os.close(self.receives)
        os.close(self._sends)


def _attach_wake_pipe(receives: Any, sends: Any, memory: SharedMemory) -> WakePipe:
    wake_pipe = WakePipe.__new__(WakePipe)
    wake_pipe._adopt(receives.detach(), sends.detach(), memory)
    return wake_pipe
