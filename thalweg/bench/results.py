"""Writing results: one JSON object with the numbers and all that is needed to repeat them (device, versions, commit,
configuration, command).
"""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import thalweg
from thalweg.bench.errors import ResultError
from thalweg.config.machine import Machine

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


def device() -> dict[str, object]:
    """This machine: processor, cores and memory that the process may use, and the GPUs that the driver lists."""
    here = Machine.here()
    memory_gib = round(here.memory / 2**30, 1)
    return {"cpu": here.cpu, "cores": here.cores, "memory_gib": memory_gib, "gpus": list(here.gpus)}


def versions() -> dict[str, str]:
    """Thalweg, Python, the system, and the installed libraries."""
    known = {"thalweg": thalweg.__version__, "python": platform.python_version(), "system": platform.platform()}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            known[name] = metadata.version(name)
    return known


def commit() -> str:
    """The commit of the source tree, with "+changes" where files differ from it; "" where this is no checkout."""
    words = ("git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    options: dict[str, Any] = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "timeout": 10}
    try:
        return str(subprocess.run(words, check=True, **options).stdout).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def date() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def hide_home(value: Any) -> Any:
    """The value as JSON has it, with ~ for the user's folder: results are shown to others."""
    if isinstance(value, str):
        home = str(Path.home())
        return value.replace(home, "~") if len(home) > 1 else value
    if isinstance(value, Mapping):
        return {name: hide_home(field) for name, field in value.items()}
    return [hide_home(element) for element in value] if isinstance(value, list | tuple) else value


def provenance(
    command: str, argv: list[str], configuration: Mapping[str, object], secrets: Collection[object] = ()
) -> dict[str, object]:
    """Fields of every result. configuration: the resolved settings in full, the server's too where it reports them.
    secrets: texts that the command must not show.
    """
    words = ["***" if any(secret and str(secret) in word for secret in secrets) else word for word in argv]
    return {
        "command": shlex.join(["thalweg", *command.split(), *words]),
        "date": date(),
        "device": device(),
        "versions": versions(),
        "commit": commit(),
        "configuration": hide_home(configuration),
    }


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file, and its folder where there is none; the file is whole at any moment. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f"{path.suffix}.new")
    new.write_bytes(content)
    new.replace(path)


def write(path: Path, result: Mapping[str, object]) -> None:
    """A `.jsonl` gets one more line, as SGLang's tools do; any other file is written anew.

    Raises ResultError where the file cannot be written, after printing the result, so that nothing is lost.
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


def save(
    path: str,
    command: str,
    argv: list[str],
    configuration: Mapping[str, object],
    result: Mapping[str, object],
    secrets: Collection[object] = (),
) -> None:
    """Writes a result with its provenance to --output-file, where that was given. Raises ResultError."""
    if path:
        write(Path(path), {**result, **provenance(command, argv, configuration, secrets)})
