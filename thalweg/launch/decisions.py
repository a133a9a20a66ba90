"""Collects the resolver's decisions for the report."""

from __future__ import annotations

from typing import TypeVar

from thalweg.core.report import AUTO, USER, Decision, Value

V = TypeVar("V", bound=Value)


class Decisions:
    """Every decision, in the order in which it was made."""

    def __init__(self) -> None:
        self.entries: list[Decision] = []

    def add(self, name: str, value: Value, source: str, reason: str) -> None:
        self.entries.append(Decision(name, value, source, reason))

    def choose(self, name: str, wish: V | None, auto: V, reason: str) -> V:
        """Returns the user's wish where there is one, else `auto`, and records the decision with its reason."""
        self.add(name, auto if wish is None else wish, AUTO if wish is None else USER, reason if wish is None else "")
        return auto if wish is None else wish


def source_and_reason(is_users: bool, reason: str) -> tuple[str, str]:
    """Source and reason for `Decisions.add`. A value that the user set needs no reason."""
    return (USER, "") if is_users else (AUTO, reason)
