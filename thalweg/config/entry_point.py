"""Entry points: a catalog row names its code as "module:name", so that the catalog itself imports neither torch nor
Triton.
"""

from __future__ import annotations

import importlib
from typing import Any


def load_entry(entry: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(f"thalweg.{module}"), name)
