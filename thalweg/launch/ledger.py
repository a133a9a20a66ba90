"""The ledger of the resolver: every choice with its source and reason."""

from __future__ import annotations

from typing import TypeVar

from thalweg.core.report import AUTO, USER, Decision, Value

V = TypeVar("V", bound=Value)


class Ledger:
    """Collects decisions. `take` returns the wish where there is one, else what was chosen for the reason given."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def note(self, name: str, value: Value, source: str, reason: str) -> None:
        self.decisions.append(Decision(name, value, source, reason))

    def take(self, name: str, wish: V | None, auto: V, reason: str) -> V:
        self.note(name, auto if wish is None else wish, AUTO if wish is None else USER, reason if wish is None else "")
        return auto if wish is None else wish


def source(asked: bool, reason: str) -> tuple[str, str]:
    """The last two of what `Ledger.note` takes: what was asked for needs no reason."""
    return (USER, "") if asked else (AUTO, reason)
