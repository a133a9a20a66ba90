"""Captures decode steps of one and two rows only: most of an engine's start is capturing."""

from __future__ import annotations

import pytest

from thalweg.models import traced


@pytest.fixture(autouse=True)
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one and of two rows are recorded, larger ones are not: most of an engine's start is recording."""
    monkeypatch.setattr(traced, "ROWS", 2)
