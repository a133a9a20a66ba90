"""A result is one JSON object: the numbers, and all that is needed to get them again (device, versions, commit,
configuration, command).
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import thalweg

LIBRARIES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "flashinfer-python",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "fa3-fwd",
)


class ResultError(Exception):
    """A result that cannot be written."""


def device() -> dict[str, object]:
    """The machine of this process: processor, cores that it may use, memory in GiB, and GPUs where the driver names
    some.
    """
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": _memory_gib(),
        "gpus": _gpu_names(),
    }


def _proc_field(file: str, field: str) -> str:
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _cpu_name() -> str:
    return _proc_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _memory_gib() -> float:
    kib = _proc_field("/proc/meminfo", "MemTotal").removesuffix("kB").strip()
    return round(int(kib) / 2**20, 1) if kib else 0.0


def _gpu_names() -> list[str]:
    try:
        shown = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in shown.stdout.splitlines() if line.strip()]


def versions() -> dict[str, str]:
    """Thalweg, Python, the system, and the libraries that are installed."""
    found = {"thalweg": thalweg.__version__, "python": platform.python_version(), "system": platform.platform()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the source tree, with "+changes" where files differ from it; "" where this is no checkout."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    return f"{head}+changes" if head and git("status", "--porcelain", "--untracked-files=no") else head


def homeless(value: Any) -> Any:
    """The same, as JSON has it, with ~ for the user's own folder: results are shown to others."""
    if isinstance(value, str):
        home = str(Path.home())
        return value.replace(home, "~") if len(home) > 1 else value
    if isinstance(value, Mapping):
        return {name: homeless(one) for name, one in value.items()}
    return [homeless(one) for one in value] if isinstance(value, list | tuple) else value


def provenance(command: str, argv: list[str], configuration: Mapping[str, object]) -> dict[str, object]:
    """What goes with every result. configuration: the resolved one, in full; of the engine too where it is known."""
    return {
        "command": shlex.join(["thalweg", *command.split(), *argv]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device(),
        "versions": versions(),
        "commit": commit(),
        "configuration": homeless(configuration),
    }


def write(path: Path, result: Mapping[str, object]) -> None:
    """Writes a result: `.jsonl` gets one more line (as SGLang's tools do), any other name is written anew, indented.

    Raises:
        ResultError: the file cannot be written. The result then goes to stdout, so that nothing measured is lost.
    """
    lines = path.suffix == ".jsonl"
    text = json.dumps(result, ensure_ascii=False, allow_nan=False, default=str, indent=None if lines else 2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if lines else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        sys.stdout.write(text)
        raise ResultError(f"cannot write {path} ({error.strerror}); the result is printed above") from error
