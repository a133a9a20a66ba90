"""Metadata of every result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thalweg.bench.results import hide_home, provenance

ROOT = Path(__file__).parents[2]


def test_a_result_does_not_name_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/somebody"))
    given = {"cache": "/home/somebody/.cache/thalweg", "depth": 2, "lists": [("on", "/home/somebody/x")], "none": None}
    want = {"cache": "~/.cache/thalweg", "depth": 2, "lists": [["on", "~/x"]], "none": None}
    assert hide_home(given) == want
    assert provenance("plan", ["models/tiny"], given)["configuration"] == want
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert hide_home("/srv/models") == "/srv/models"


def test_no_committed_result_names_one() -> None:
    for path in (ROOT / "benchmarks").rglob("*.json"):
        text = json.dumps(json.loads(path.read_text(encoding="utf-8")))
        assert "/root/" not in text and "/home/" not in text, path
