"""Folders of compiled kernels, which are kept from one start to the next."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from functools import cache
from pathlib import Path

import msgspec

from thalweg import __version__
from thalweg.config.engine import EngineConfig
from thalweg.core.step_times import StepTimes

DEFAULT = Path("~/.cache/thalweg")
FOLDERS = {"TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deep_gemm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
PACKAGES = "torch", "triton", "sgl-deep-gemm"  # whose versions compiled kernels depend on
# packages whose code decides what runs
ROOMS = "attention batch engine kernels layers models quant runner sampling spec".split()
# fields that no kernel depends on
INDEPENDENT = """
model_path load_format weight_updates cache_dir random_seed report show_progress log_start max_queued_requests log_level
log_format crash_dump_folder watchdog_timeout watchdog_action restart_timeout
""".split()


def use(folder: str) -> Path:
    """Sets the cache folders of the compilers, and returns the root. Must be called before the first kernel.

    folder: "" is DEFAULT, unless the compilers' own variables name other folders.
    """
    root = Path(folder or DEFAULT).expanduser()
    for variable, name in FOLDERS.items():
        if folder:
            os.environ[variable] = str(root / name)
        else:
            os.environ.setdefault(variable, str(root / name))
    return root


def size_of(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def versions() -> dict[str, str]:
    """The versions on which compiled kernels depend, and the GPU's architecture; "" for what is missing."""
    import torch

    found = {"thalweg": __version__, "cuda": torch.version.cuda or ""}
    for name in PACKAGES:
        found[name] = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else ()
    return found | {"architecture": f"sm_{''.join(map(str, capability))}" if capability else ""}


def is_warm(config: EngineConfig) -> bool:
    """Whether a warm-up of this configuration has filled the folders."""
    return all(mark.exists() for mark in _marks(config))


def step_times(config: EngineConfig) -> StepTimes | None:
    """Those that an earlier start of this configuration measured on such a GPU with such weights; None without one."""
    return _step_times(_marks(config)[0]).get(_measured_with(config))


def _step_times(mark: Path) -> dict[str, StepTimes]:
    """By what they were measured with. Kernels in an archive or an image may go to other GPUs."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(mark.read_bytes(), type=dict[str, StepTimes])
    return {}


def _measured_with(config: EngineConfig) -> str:
    """Random weights choose other experts."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return f"{gpu}, {'random' if config.load_format == 'dummy' else 'published'} weights"


def mark_warm(config: EngineConfig, times: StepTimes | None = None) -> None:
    """Notes that the folders hold all kernels of this configuration's warm-up, and the step times that it measured."""
    with contextlib.suppress(OSError):  # the next start compiles ahead again, and finds all kernels
        for mark in _marks(config):
            mark.parent.mkdir(parents=True, exist_ok=True)
            new = {} if times is None else {_measured_with(config): times}
            mark.write_bytes(msgspec.json.encode(_step_times(mark) | new))


@cache
def _sources() -> str:
    """A hash of the code of ROOMS, which a start asks for several times."""
    paths = sorted(path for room in ROOMS for path in (Path(__file__).parents[1] / room).rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def _marks(config: EngineConfig) -> list[Path]:
    """Files beside Triton's kernels, and beside DeepGEMM's where it is used, so that they vanish with them."""
    fields = msgspec.to_builtins(config)
    settings = {name: value for name, value in fields.items() if name not in INDEPENDENT}
    model = (Path(config.model_path) / "config.json").read_text()
    state = json.dumps([settings, model, versions(), _sources()])
    name = f"warm-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    used = ["TRITON_CACHE_DIR"]
    if any("deep_gemm" in backend for backend in (config.kernels.moe, config.kernels.fp8_gemm)):
        used.append("DG_JIT_CACHE_DIR")
    return [Path(os.environ[variable], name) for variable in used]
