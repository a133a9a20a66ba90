"""A `thalweg serve` of our own to measure: started on a free port, pinned to cores, metered through /proc, and
stopped.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
START_SECONDS = 300.0
_ADDRESS = re.compile(r"^Thalweg serves .* at (https?://\S+)$", re.MULTILINE)


class ServerError(Exception):
    """The server cannot be started or measured; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Usage:
    """cpu: seconds of user and system time since its start, all threads. rss: bytes of memory that it holds. files:
    open descriptors.
    """

    cpu: float
    rss: int
    files: int


def usage(pid: int) -> Usage:
    """What a process has used. Raises ServerError when it is gone."""
    place = Path(f"/proc/{pid}")
    try:
        words = (place / "stat").read_text().rpartition(")")[2].split()  # the name in front may hold spaces
        resident = int((place / "statm").read_text().split()[1])
        files = len(os.listdir(place / "fd"))
    except OSError as error:
        raise ServerError(f"process {pid} of the server is gone ({error.strerror}): see what it said above") from error
    return Usage((int(words[11]) + int(words[12])) / TICKS, resident * PAGE_BYTES, files)


def engines(pid: int) -> list[int]:
    """The engine processes of a server: those of its children that multiprocessing spawned for work."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
    return sorted(found)


def pin(pid: int, cores: Collection[int]) -> None:
    """All threads of a process run on these cores from now on, and so will those that they start."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def raise_file_limit(needed: int) -> None:
    """Lets this process, and those that it starts, open `needed` files. Raises ServerError when the hard limit is
    lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ServerError(
                f"{needed} open files are needed and this user may have {hard}: ask for fewer --streams, or raise the"
                " hard limit (`ulimit -Hn` shows it; /etc/security/limits.conf, or LimitNOFILE= of a systemd unit)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class OwnServer:
    """`async with OwnServer(words) as server:` runs `thalweg serve WORDS --port 0` in there. url, pid and engine are
    known inside.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = (sys.executable, "-m", "thalweg", "serve", *words, "--port", "0")
        self.url, self.pid, self.engine = "", 0, 0

    async def __aenter__(self) -> OwnServer:
        if not Path("/proc/self/stat").exists():
            raise ServerError("processes are measured through /proc, which this system has not: run it on Linux")
        self._folder = TemporaryDirectory(prefix="thalweg-load-")
        self._log = Path(self._folder.name) / "server.log"
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(*self.words, stdout=log, stderr=log)
        self.pid = self._process.pid
        try:
            await self._wait()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _wait(self) -> None:
        """Until the server says where it is reached. Raises ServerError with its last words when it ends before."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            if found := _ADDRESS.search(self.words_said()):
                break
            if self._process.returncode is not None or time.monotonic() > deadline:
                said = "\n".join(self.words_said().strip().splitlines()[-12:])
                raise ServerError(f"the server did not start: `{' '.join(self.words[1:])}` said\n{said}")
            await asyncio.sleep(0.1)
        self.url = found[1]
        pids = engines(self.pid)
        if len(pids) != 1:
            raise ServerError(
                f"the server runs {len(pids)} engine processes, this measures one: start it with one device"
            )
        self.engine = pids[0]

    def words_said(self) -> str:
        """What the server has written so far."""
        return self._log.read_text(errors="replace")

    async def _stop(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), 40)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._folder.cleanup()
