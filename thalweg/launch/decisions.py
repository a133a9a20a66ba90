"""Collects the resolver's decisions: entries of the report, and fields of the `EngineConfig` that they make."""

from __future__ import annotations

from typing import Any, TypeVar

from thalweg.config.engine import EngineConfig
from thalweg.core.report import AUTO, USER, Decision, Report, Value

V = TypeVar("V", bound=Value)
NO_CACHE = "without effect: there is no prefix cache"


class Decisions:
    """Every decision, in the order in which it was made."""

    def __init__(self) -> None:
        self.entries: list[Decision] = []
        self.fields: dict[str, Any] = {}  # values by name; some fields are set here alone

    def add(self, name: str, value: Value, source: str, reason: str) -> None:
        self.entries.append(Decision(name, value, source, reason))
        self.fields[name] = value

    def record(self, name: str, value: Value, is_users: bool, reason: str) -> None:
        """A value that the user set needs no reason."""
        self.add(name, value, USER if is_users else AUTO, "" if is_users else reason)

    def choose(self, name: str, wish: V | None, auto: V, reason: str) -> V:
        """Returns the user's value, else `auto`, and records the decision with its reason."""
        value = auto if wish is None else wish
        self.record(name, value, wish is not None, reason)
        return value

    def config(self, **fields: Any) -> EngineConfig:
        """The configuration of these decisions. fields: replace or complete them."""
        known = {"model_path": ""} | self.fields | fields | {"report": Report(tuple(self.entries))}
        return EngineConfig(**{name: known[name] for name in EngineConfig.__struct_fields__ if name in known})
