"""The model that comes with Thalweg."""

from __future__ import annotations

from pathlib import Path

NAME = "models/tiny"
FOLDER = Path(__file__).parents[1] / "bundled" / "tiny"  # a link to `NAME` in the repository, a copy where installed
NOTICE = f"no MODEL was given: {NAME} is used, which comes with Thalweg"


def find_bundled(model: str) -> str:
    """The bundled model's folder where `NAME` is asked for and is no folder here; else `model` as it is."""
    return str(FOLDER) if model == NAME and not Path(model).is_dir() and FOLDER.is_dir() else model
