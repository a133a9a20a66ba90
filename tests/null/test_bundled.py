"""The bundled model, in the repository and in what pip installs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from thalweg.config.bundled import FOLDER, NAME, find_bundled

ROOT = Path(__file__).parents[2]


def test_a_wheel_carries_every_file_of_the_model() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["thalweg"]
    carried = {path.name for pattern in patterns for path in (ROOT / "thalweg").glob(pattern)}
    assert carried == {path.name for path in (ROOT / NAME).iterdir()}
    assert FOLDER.resolve() == ROOT / NAME and (FOLDER / "model.safetensors").stat().st_size > 10_000_000


def test_its_name_means_it_where_no_folder_has_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_bundled(NAME) == str(FOLDER) and find_bundled("org/name") == "org/name"
    (tmp_path / NAME).mkdir(parents=True)
    assert find_bundled(NAME) == NAME, "a folder here comes first"
