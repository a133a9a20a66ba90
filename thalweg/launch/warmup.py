"""`thalweg warmup`: starts an engine as `serve` would with the same flags, without a front and without the checkpoint's
weights, so that all that is compiled lies in the cache folder when a server starts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from thalweg.config.options import Options
from thalweg.core import logs
from thalweg.core.format import format_bytes
from thalweg.engine import caches
from thalweg.launch.cache_archive import export_cache, import_cache
from thalweg.launch.resolve import resolve


def warmup(config: Options, export: Path | None = None, archive: Path | None = None) -> int:
    """Compiles and says what; returns the exit status. Raises UnsupportedConfig or CheckpointError as `serve` would.

    export: only writes the compiled kernels to this file. archive: only takes them from it.
    """
    if export is not None:
        return export_cache(config.load.cache_dir or "", export)
    if archive is not None:
        return import_cache(config.load.cache_dir or "", archive)
    logs.configure(config.server.log_level, config.server.log_format)
    resolved = resolve(config, weights=False)
    if resolved.engine.device != "cuda":
        print(
            "nothing to compile: kernels are compiled for a GPU only, and this machine has none, or --device cpu is set"
        )
        return 0
    begun, folder = time.monotonic(), caches.use(resolved.engine.cache_dir)
    before = _kernels()
    from thalweg.engine.local import LocalEngine
    from thalweg.kernels.compilations import Compilations  # needs Triton

    with Compilations() as seen:
        # kernels depend on shapes alone, so random weights do, and none are read
        LocalEngine(msgspec.structs.replace(resolved.engine, load_format="dummy", weight_updates=(), warmup=True))
    made, jit = (after - count for after, count in zip(_kernels(), before, strict=True))
    print(
        f"{made} Triton kernels compiled, {len(seen.compiled)} of them one after the other; {len(seen.loaded)} found;"
        f" {jit} of DeepGEMM compiled; {time.monotonic() - begun:.0f} s.\n{folder} holds"
        f" {format_bytes(caches.size_of(folder))}: give `thalweg serve` the same flags and it starts warm."
    )
    return 0


def _kernels() -> tuple[int, int]:
    """Kernels in the cache folders of Triton and DeepGEMM."""
    roots = (Path(os.environ[name]) for name in ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR"))
    triton, deep_gemm = (sum(1 for _ in root.rglob("*.cubin")) for root in roots)
    return triton, deep_gemm
