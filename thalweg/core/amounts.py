"""Amounts in words."""

from __future__ import annotations


def size(count: int) -> str:
    """Bytes in words, e.g. 16.3 GB."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
