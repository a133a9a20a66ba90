"""The folder in which a front meets its engine's process. Whoever is killed leaves his behind; the next one that starts
clears it away.
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
YOUNG = 60.0  # seconds in which a folder may not have its lock yet


@contextmanager
def ipc_directory() -> Iterator[str]:
    """A fresh folder, locked while it is in use; the lock ends with its process, however that ends."""
    clear()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        with open(Path(folder) / LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder


def clear() -> None:
    """Removes the folders of this user that nobody holds any more."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(OSError):  # somebody else's, or somebody else removes it too
            found = folder.lstat()
            if found.st_uid == os.getuid() and found.st_mtime < time.time() - YOUNG:
                _remove(folder)


def _remove(folder: Path) -> None:
    with open(folder / LOCK, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
