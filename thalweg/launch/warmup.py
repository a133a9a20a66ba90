"""`thalweg warmup`: starts an engine as `serve` would with the same flags, without a front and without the checkpoint's
weights, so that all that is compiled lies in the cache folder when a server starts.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from thalweg.config.options import Options
from thalweg.core import logs
from thalweg.core.format import format_bytes
from thalweg.engine import caches
from thalweg.launch.resolve import resolve


def warmup(config: Options) -> int:
    """Compiles and says what; returns the exit status. Raises UnsupportedConfig or CheckpointError as `serve` would."""
    logs.configure(config.server.log_level, config.server.log_format)
    resolved = resolve(config, weights=False)
    if resolved.engine.device != "cuda":
        print(
            "nothing to compile: kernels are compiled for a GPU only, and this machine has none, or --device cpu is set"
        )
        return 0
    begun, folder = time.monotonic(), caches.use(resolved.engine.cache_dir)
    before = _libraries(folder)
    from thalweg.engine.local import LocalEngine
    from thalweg.kernels.compilations import Compilations  # needs Triton

    with Compilations() as seen:
        # kernels depend on shapes alone, so random weights do, and none are read
        LocalEngine(msgspec.structs.replace(resolved.engine, load_format="dummy", weight_updates=(), warmup=True))
    made, jit = len(seen.compiled), _libraries(folder) - before
    print(
        f"{made} Triton kernels compiled, {len(seen.loaded)} found; {jit} of DeepGEMM compiled;"
        f" {time.monotonic() - begun:.0f} s.\n{folder} holds {format_bytes(caches.size_of(folder))}: give `thalweg"
        " serve` the same flags and it starts warm."
    )
    return 0


def _libraries(folder: Path) -> int:
    """Kernels that DeepGEMM has compiled: a folder each."""
    return sum(path.is_dir() for path in (folder / "deep_gemm" / "cache").glob("*"))
