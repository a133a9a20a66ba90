"""Formats numbers for people."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """`16300000000` → `16.3 GB`."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
