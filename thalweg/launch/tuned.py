"""Finds the results of `thalweg tune` for this device, and reads those that can be used. Nothing is searched here.

A folder for a device and the versions of what computes on it, in it a file for each operation and shape:
`~/.cache/thalweg/tuned/nvidia-h100-80gb-hbm3-torch-2.11.0-triton-3.6.0/gemv-3648-2048-2-0.json`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import msgspec

from thalweg.config.machine import Machine
from thalweg.config.options import Options
from thalweg.core.kernels import TunedKernel, TuningValues
from thalweg.core.report import AUTO, USER
from thalweg.engine import caches
from thalweg.kernels.tuned import SOURCES, digest
from thalweg.launch.decisions import Decisions

log = logging.getLogger("thalweg.launch")

NAME = "tuned_kernels"
DEFAULT = "default table"


class TunedCase(msgspec.Struct, frozen=True):
    """One case of a file."""

    case: str
    default: TuningValues
    choice: TuningValues
    us: float  # of a call
    default_us: float
    candidates: int  # how many were tried


class TunedFile(msgspec.Struct, frozen=True):
    """The results for one operation and shape."""

    operation: str
    key: TuningValues
    device: str
    versions: dict[str, str]
    source: str  # digest of the code that was measured
    found: tuple[TunedCase, ...]
    made: dict[str, object] = {}  # when, and from which commit
    checksum: str = ""  # of the results: a damaged or edited file could hold a tile that computes something else

    def contents(self) -> str:
        """The checksum of what the file holds."""
        return sha256(msgspec.json.encode((self.operation, self.key, self.found))).hexdigest()[:16]

    def sealed(self) -> TunedFile:
        return msgspec.structs.replace(self, checksum=self.contents())


def device_name(machine: Machine, device: str) -> str:
    return machine.gpus[0] if device == "cuda" and machine.gpus else machine.cpu


def versions(device: str) -> dict[str, str]:
    """Versions of the libraries that compute on a device."""
    found = dict.fromkeys(("torch", "triton") if device == "cuda" else ("torch",), "none")
    for name in found:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def file_name(operation: str, key: TuningValues) -> str:
    return _slug("-".join(map(str, (operation, *key)))) + ".json"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-")


def folder_of(machine: Machine, device: str, cache_dir: str) -> Path:
    """The files of this device."""
    words = [device_name(machine, device), *(f"{name}-{version}" for name, version in versions(device).items())]
    return Path(cache_dir or caches.DEFAULT).expanduser() / "tuned" / _slug("-".join(words))


def resolve_tuned(config: Options, machine: Machine, device: str, decisions: Decisions) -> tuple[TunedKernel, ...]:
    """The choices to use, and a word about them in the report."""
    if not config.load.tuned_kernels:
        decisions.add(NAME, DEFAULT, USER, "")
        return ()
    folder = folder_of(machine, device, config.load.cache_dir or "")
    files = list(read(folder, device_name(machine, device), versions(device)))
    if not files:
        decisions.add(NAME, DEFAULT, AUTO, "`thalweg tune` has not run for this device and these versions")
        return ()
    rows = tuple(
        TunedKernel(file.operation, file.key, case.default, case.choice)
        for file in files
        for case in file.found
        if case.choice != case.default
    )
    decisions.add(NAME, str(folder), AUTO, f"{len(rows)} choices there are faster than the kernels' own tables")
    return rows


def read(folder: Path, device: str, versions: dict[str, str]) -> Iterator[TunedFile]:
    """The files that can be used. All others together are worth one warning: they are ignored."""
    wrong = []
    for path in sorted(folder.glob("*.json")):
        try:
            file = load(path)
        except (OSError, msgspec.MsgspecError) as error:
            wrong.append(f"{path.name} cannot be read ({error})")
            continue
        if why := unfit(file, device, versions):
            wrong.append(f"{path.name} {why}")
        else:
            yield file
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        log.warning("%s: not used: %s%s; `thalweg tune` makes them anew", folder, wrong[0], more)


def load(path: Path) -> TunedFile:
    """Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode(path.read_bytes(), type=TunedFile)


def unfit(file: TunedFile, device: str, versions: dict[str, str]) -> str:
    """Why a file is not for this device and this code; "" where it is."""
    if file.operation not in SOURCES:
        return f"is for an operation that is not known here, {file.operation!r}"
    if (file.device, file.versions) != (device, versions):
        return f"was made on {file.device} with {file.versions}"
    if file.source != digest(file.operation):
        return "was made for another version of the kernel"
    return "" if file.checksum == file.contents() else "was damaged or edited"
