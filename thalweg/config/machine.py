"""CPU, memory and GPUs of this machine, from the operating system and the container's limits. No torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from thalweg.config.backends import chip_of, installed_libraries

NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number where there is no limit


@dataclass(frozen=True, slots=True)
class Machine:
    """CPU, memory, GPUs and libraries of a machine. The engine checks at start whether the libraries run."""

    cpu: str
    cores: int  # that this process may use
    memory: int  # bytes
    free: int  # bytes, with what the page cache would give back
    gpus: tuple[str, ...] = ()  # names of the NVIDIA GPUs that the driver shows
    gpu_free: int = 0  # bytes that are free on the first
    capability: str = ""  # of the first, such as "9.0"
    libraries: frozenset[str] = frozenset()  # those of `config.backends` that are installed

    @property
    def chip(self) -> str:
        """The generation of the first GPU."""
        return chip_of(self.capability)

    @staticmethod
    def here() -> Machine:
        """This machine, without what its container may not use."""
        memory, free = _host_memory()
        for limit, used in _cgroup_memory():
            memory = min(memory, limit)
            free = min(free, limit - used)
        return Machine(_cpu_name(), cores(), memory, max(free, 0), *_gpus(), installed_libraries())


def cores() -> int:
    """Cores of the affinity mask, less where a cgroup's CPU quota allows less."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _read(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0] != "max":
        usable = min(usable, max(1, int(quota[0]) // int(quota[1])))
    return usable


def _host_memory() -> tuple[int, int]:
    rows = (line.split() for line in _read(Path("/proc/meminfo")).splitlines())
    table = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2}
    if "MemTotal" in table:
        return table["MemTotal"], table.get("MemAvailable", table.get("MemFree", 0))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total // 2  # macOS does not report free memory; half is a careful guess


def _cgroup_memory() -> list[tuple[int, int]]:
    """(limit, used) in bytes of each memory cgroup that limits this process; reclaimable page cache counts as free."""
    found = []
    for limit_file, used_file, stat_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        root = Path("/sys/fs/cgroup")
        limit, used = _read(root / limit_file).strip(), _read(root / used_file).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < NO_LIMIT:
            stat = dict(line.split() for line in _read((root / used_file).parent / "memory.stat").splitlines())
            found.append((int(limit), max(0, int(used) - int(stat.get(stat_key, 0)))))
    return found


def _cpu_name() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> tuple[tuple[str, ...], int, str]:
    """Names, and the free bytes and compute capability of the first, by the driver's own tool; none without a
    driver.
    """
    query = ["nvidia-smi", "--query-gpu=memory.free,compute_cap,uuid,name", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return (), 0, ""
    rows = [[cell.strip() for cell in row.split(",", 3)] for row in told.splitlines() if row.strip()]
    rows = visible(rows, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not rows:
        return (), 0, ""
    return tuple(name for *_, name in rows), int(rows[0][0]) * 2**20, rows[0][1]


def visible(rows: list[list[str]], variable: str | None) -> list[list[str]]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order. It has numbers or the beginnings of UUIDs (column 2),
    and ends at the first that is none.
    """
    if variable is None:
        return rows
    found = []
    for name in (word.strip() for word in variable.split(",")):
        same = [row for i, row in enumerate(rows) if name == str(i) or name and row[2].startswith(name)]
        if not same:
            break
        found.append(same[0])
    return found


def _read(path: Path) -> str:
    """The file's text; "" where there is none (another system, no cgroup)."""
    try:
        return path.read_text()
    except OSError:
        return ""
