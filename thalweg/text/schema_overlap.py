"""Proves that no value matches two branches of a oneOf, which then is the same as an anyOf."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

MAX_DEPTH = 6  # of properties in properties
MAX_STEPS = 50_000  # of one schema; what is not proven by then counts as an overlap
_ALL = frozenset(("null", "boolean", "number", "string", "array", "object"))
_TYPE_OF: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


class Overlaps:
    """defs: the definitions that references of a normalized schema name."""

    def __init__(self, defs: Mapping[str, Any]) -> None:
        self._defs, self._steps = defs, 0

    def any_of(self, branches: Sequence[Any]) -> bool:
        """Whether a value may match two of the branches."""
        return any(not self._disjoint([a], [b], MAX_DEPTH) for a, b in combinations(branches, 2))

    def _disjoint(self, a: Sequence[Any], b: Sequence[Any], depth: int) -> bool:
        """Whether no value matches all schemas of both lists."""
        parts = self._parts([*a, *b], depth)
        if self._steps > MAX_STEPS or depth == 0:
            return False
        if False in parts:
            return True
        if not frozenset.intersection(*map(_types, parts)) if parts else False:
            return True
        values = [
            set(map(_key, part["enum"] if "enum" in part else [part["const"]])) for part in parts if _is_finite(part)
        ]
        if values and not set.intersection(*values):
            return True
        if self._no_object(parts, depth):
            return True
        for i, part in enumerate(parts):  # the alternatives of one part, each with the other parts
            if "anyOf" in part:
                rest = [*parts[:i], {key: value for key, value in part.items() if key != "anyOf"}, *parts[i + 1 :]]
                if all(self._disjoint([branch], rest, depth - 1) for branch in part["anyOf"]):
                    return True
        return False

    def _no_object(self, parts: Sequence[Any], depth: int) -> bool:
        """Whether objects alone can match, and a member that one of the parts requires cannot."""
        if all("object" in _types(part) for part in parts) and any(_types(part) == {"object"} for part in parts):
            for name in {name for part in parts for name in part.get("required", ())}:
                members = [self._member(part, name) for part in parts]
                if False in members or self._disjoint([m for m in members if m], [], depth - 1):
                    return True
        return False

    def _member(self, part: Mapping[str, Any], name: str) -> Any:
        if name in part.get("properties", ()):
            return part["properties"][name]
        return {} if "patternProperties" in part else part.get("additionalProperties", {})

    def _parts(self, schemas: Sequence[Any], depth: int) -> list[Any]:
        """The schemas that hold together: those of references and allOf beside their owners."""
        parts, waiting, seen = [], list(schemas), set()
        while waiting and self._steps <= MAX_STEPS:
            self._steps += 1
            part = waiting.pop()
            if part is False:
                return [False]
            parts.append(part)
            waiting += part.get("allOf", ())
            reference = part.get("$ref")
            if reference is not None and reference not in seen:
                seen.add(reference)
                waiting.append(self._defs[reference.removeprefix("#/$defs/")])
        return parts


def _is_finite(part: Mapping[str, Any]) -> bool:
    return "enum" in part or "const" in part


def _types(part: Mapping[str, Any]) -> frozenset[str]:
    types = part.get("type")
    names = _ALL if types is None else frozenset([types] if isinstance(types, str) else types)
    names = names - {"integer"} | ({"number"} if "integer" in names else set())
    if _is_finite(part):
        names &= {_TYPE_OF[type(value)] for value in (part["enum"] if "enum" in part else [part["const"]])}
    return names


def _key(value: Any) -> str:
    """Equal for values that JSON Schema holds for equal."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"n{float(value)}"
    return json.dumps(value, sort_keys=True)
