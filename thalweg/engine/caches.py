"""Folders of compiled kernels, which are kept from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT = Path("~/.cache/thalweg")
FOLDERS = {"TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deep_gemm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


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
