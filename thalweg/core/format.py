"""Formats numbers for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_bytes(count: int) -> str:
    """`16300000000` → `16.3 GB`."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def format_known(column: str, row: Mapping[str, Any]) -> str:
    """ "" where the row lacks a field, or it is None and has a format."""
    try:
        return column.format_map(row)
    except (KeyError, TypeError):
        return ""
