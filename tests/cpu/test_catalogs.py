"""The catalogs name code that exists."""

from __future__ import annotations

import importlib.util

import pytest

from thalweg.config import backends
from thalweg.config.entry_point import load_entry

ENTRIES = sorted(
    {
        entry
        for row in backends.ALL
        for entry in (row.mla, row.sparse, row.index_scores, row.check_mla, row.check_gqa, row.check)
        if entry
    }
)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_point_of_a_backend_is_callable(entry: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("kernels need Triton")
    assert callable(load_entry(entry))


def test_a_missing_library_is_reported() -> None:
    library = backends.Library("none", "thalweg_has_no_such_module")
    assert not library.is_installed() and backends.libraries_for("hopper") >= {"triton", "deep_gemm"}
