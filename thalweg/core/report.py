"""The report of a start: every decision about an engine's configuration, with its source and reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

USER, AUTO, MODEL, START_UP = "user", "auto", "model", "start-up"

Value = str | int | float | bool


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """One decision."""

    name: str
    """The flag's name with underscores, or the name of a measured value."""
    value: Value | None
    """None: the decision no longer applies."""
    source: str
    """USER (a flag), AUTO (the resolver), MODEL (the checkpoint) or START_UP (measured or corrected by the engine)."""
    reason: str
    """Why, in words; empty where the user set the value."""


class Report(msgspec.Struct, frozen=True):
    """Decisions in the order in which they were made. A later decision of the same name replaces the earlier one."""

    decisions: tuple[Decision, ...] = ()

    def append(self, decisions: Iterable[Decision]) -> Report:
        return Report((*self.decisions, *decisions))

    def current(self) -> dict[str, Decision]:
        """The decisions that apply, by name."""
        latest = {decision.name: decision for decision in self.decisions}
        return {name: decision for name, decision in latest.items() if decision.value is not None}

    def is_users(self, name: str) -> bool:
        """Whether the user set this value, so that nothing may change it."""
        decision = self.current().get(name)
        return decision is not None and decision.source == USER

    def as_tree(self) -> Mapping[str, dict[str, Any]]:
        """The decisions that apply as plain values by name, for JSON."""
        return {name: msgspec.to_builtins(decision) for name, decision in self.current().items()}
