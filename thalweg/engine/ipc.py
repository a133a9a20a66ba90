"""The directory with the socket between a client and its engine process. A killed client leaves its directory; the next
start removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "thalweg-"
LOCK = "lock"
YOUNG = 60.0  # seconds in which a new directory may have no lock yet


@contextmanager
def ipc_directory() -> Iterator[str]:
    """A new directory. Its lock ends with this process, however the process ends."""
    remove_stale()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        with open(Path(folder) / LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder


def remove_stale() -> None:
    """Removes this user's directories that no process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(OSError):  # another process removes it too, or has locked it
            info = folder.lstat()
            if info.st_uid == os.getuid() and info.st_mtime < time.time() - YOUNG:
                with open(folder / LOCK, "rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
