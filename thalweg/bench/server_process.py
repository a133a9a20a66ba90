"""A `thalweg serve` of a benchmark's own: started on a free port, with its log read for the times of its start, its
processes metered through /proc and pinned to cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from thalweg.bench.errors import BenchError

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
START_SECONDS, STOP_SECONDS = 300.0, 40.0
LAST_LINES = 12  # of the log of a server that did not start


class ProcessUsage(NamedTuple):
    """The resources of one process."""

    cpu: float  # seconds of user and system time since its start, all threads
    rss: int  # bytes of resident memory
    files: int  # open descriptors


def usage(pid: int) -> ProcessUsage:
    """Raises BenchError when the process is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()  # the name before may have spaces
        resident = int((folder / "statm").read_text().split()[1])
        files = len(os.listdir(folder / "fd"))
    except OSError as error:
        raise BenchError(f"process {pid} of the server is gone ({error.strerror}): see its output above") from error
    return ProcessUsage((int(fields[11]) + int(fields[12])) / CLOCK_TICKS, resident * PAGE_BYTES, files)


def engine_processes(pid: int) -> list[int]:
    """The engine processes of a server: its children that multiprocessing spawned."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def pin(pid: int, cores: Collection[int]) -> None:
    """Restricts all threads of a process, and those that they will start, to these cores."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def raise_file_limit(needed: int, required: bool = True) -> None:
    """Lets this process, and those that it starts, open `needed` files. Raises BenchError where the hard limit is lower
    and they are required.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        if required:
            raise BenchError(
                f"{needed} open files are needed and this user may have {hard}: ask for fewer --streams, or raise the"
                " hard limit (`ulimit -Hn` shows it; /etc/security/limits.conf, or LimitNOFILE= of a systemd unit)"
            )
        needed = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class ServerProcess:
    """`async with ServerProcess(flags) as server:` runs `thalweg serve FLAGS --port 0`, and is ready inside."""

    def __init__(
        self, flags: Sequence[str], start_seconds: float = START_SECONDS, env: Mapping[str, str] | None = None
    ) -> None:
        """env: its environment variables; None: this process's."""
        self.words = ("-m", "thalweg", "serve", *flags, "--port", "0", "--log-format", "json")
        self.start_seconds, self.env, self.pid = start_seconds, env, 0
        self.lines: list[str] = []  # of its log
        self.marks: dict[str, float] = {}  # seconds from the start to the lines "resolved", "started" and "ready"
        self.records: dict[str, dict[str, Any]] = {}  # those lines

    @property
    def url(self) -> str:
        return str(self.records["ready"]["url"])

    @property
    def engine(self) -> int:
        """The process of its engine. Raises BenchError unless there is exactly one."""
        pids = engine_processes(self.pid)
        if len(pids) != 1:
            raise BenchError(f"the server runs {len(pids)} engine processes: start it with one device")
        return pids[0]

    async def __aenter__(self) -> ServerProcess:
        if not Path("/proc/self/stat").exists():
            raise BenchError("processes are measured through /proc, which this system does not have: use Linux")
        self.began, pipe = time.perf_counter(), asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *self.words, stdout=pipe, stderr=asyncio.subprocess.STDOUT, limit=2**24, env=self.env
        )
        self.pid = self._process.pid
        self._reading = asyncio.create_task(self._read())
        try:
            await self._wait()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            now, text = time.perf_counter() - self.began, line.decode(errors="replace").rstrip()
            self.lines.append(text)
            with suppress(ValueError, AttributeError):
                record = json.loads(text)
                name = str(record.get("message", "")).partition(":")[0]
                if name in ("resolved", "started", "ready") and name not in self.marks:
                    self.marks[name], self.records[name] = now, record

    async def _wait(self) -> None:
        """Until it is ready. Raises BenchError with its last lines when it ends before."""
        while "ready" not in self.marks:
            late = time.perf_counter() - self.began > self.start_seconds
            if late or self._reading.done():
                reason = f"it took more than {self.start_seconds:g} s" if late else "it ended"
                last = "\n".join(self.lines[-LAST_LINES:])
                raise BenchError(f"the server did not start, {reason}: `{' '.join(self.words[1:])}` printed\n{last}")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading
