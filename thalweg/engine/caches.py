"""Where compiled kernels are kept from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT = Path("~/.cache/thalweg")
FOLDERS = {"TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deep_gemm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def use(folder: str) -> Path:
    """Has the compilers of this process keep theirs in `folder`, or, where it is "", in DEFAULT unless their own
    variables say otherwise.

    The compilers read these variables, and nothing else tells them; so it must come before the first kernel. Returns
    the folder.
    """
    root = Path(folder or DEFAULT).expanduser()
    for variable, name in FOLDERS.items():
        if folder:
            os.environ[variable] = str(root / name)
        else:
            os.environ.setdefault(variable, str(root / name))
    return root


def size_of(folder: Path) -> int:
    """Bytes of the files below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
