"""Most of an engine's start on a CPU is tracing its decode steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from thalweg.models import traced


@pytest.fixture(autouse=True, scope="module")
def one_traced_row() -> Iterator[None]:
    """Steps of one row are traced, larger ones are not. `test_models_traced.py` has all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "ROWS", 1)
        yield
