"""Writes the result of a soak run under benchmarks/soak."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks" / "soak"


def write(name: str, command: str, seconds: float, counts: dict[str, Any]) -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    result = {"command": command, "python": platform.python_version(), "seconds": round(seconds, 1), **counts}
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
