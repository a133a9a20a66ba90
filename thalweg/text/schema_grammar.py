"""From a JSON schema to one that compiles, with a note on each keyword that its grammar does not enforce."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits

from thalweg.text.json_schema import SchemaError, escape, normalize

CACHED = 64  # rewritten schemas
MAX_PROBES = 120  # compilations to find what does not compile
MAX_PROBED = 1 << 20  # characters of the schemas in them, so that a server and its engine decide alike
MAX_SECONDS = 1.0  # of CPU time for them, beyond which a hostile schema is refused
# With these limits, by the library's figures, compiling takes at most some 100 ms, a mask some 10 ms.
LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=15_000,
    verbose_errors=False,
)
# Without \\u, no key is written in two ways, so none escapes its schema.
_JSON_STYLE = {"whitespace_flexible": False, "lenient": False, "json_allowed_escapes": 'nrbtf\\"'}
# Between the parts of a JSON text: nothing, a space, or a new line with its indentation. Without this limit models may
# write space forever.
_SPACED = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,24})"}
_UNSATISFIABLE = "Unsatisfiable"
# What is left out, in this order, where a subschema does not compile, and where it comes from in the source.
_OPTIONAL = {
    "minProperties": ("minProperties",),
    "maxProperties": ("maxProperties",),
    "pattern": ("pattern", "format"),
    "format": ("format",),
    "multipleOf": ("multipleOf",),
    "maxItems": ("maxItems",),
    "maxLength": ("maxLength", "format"),
    "minimum": ("minimum",),
    "maximum": ("maximum",),
    "exclusiveMinimum": ("exclusiveMinimum", "minimum"),
    "exclusiveMaximum": ("exclusiveMaximum", "maximum"),
    "patternProperties": ("patternProperties",),
    "anyOf": ("anyOf", "oneOf"),
    "$ref": ("$ref",),
    "items": ("items", "additionalItems", "unevaluatedItems"),
    "additionalProperties": ("additionalProperties", "unevaluatedProperties"),
}


class EnforceableSchema(NamedTuple):
    schema: dict[str, Any]
    notes: dict[str, str]  # JSON pointer of a keyword that is not, or not fully, enforced → how it is treated


@lru_cache(CACHED)
def enforceable(source: str) -> EnforceableSchema:
    """source: a schema as JSON. Raises SchemaError naming the place that is malformed or cannot be enforced."""
    return _Repair(json.loads(source)).run()


def styled(schema: dict[str, Any], any_whitespace: bool = True) -> dict[str, Any]:
    return {**schema, "x-guidance": _JSON_STYLE | (_SPACED if any_whitespace else {})}


class _Repair:
    def __init__(self, source: Any) -> None:
        self.source = source
        self.schema, self.notes, self.paths = normalize(source)
        self.defs: dict[str, Any] = self.schema.get("$defs", {})
        self.probes, self.probed, self.began = 0, 0, time.thread_time()

    def run(self) -> EnforceableSchema:
        while error := self._error(self.schema):
            culprit = self._locate(self.schema, error.startswith(_UNSATISFIABLE), set())
            if error.startswith(_UNSATISFIABLE):
                raise SchemaError(self.paths.get(id(culprit), ""), "contradicts itself: no value matches")
            self._relax(culprit)
        return EnforceableSchema(self.schema, self.notes)

    def _error(self, node: Any) -> str:
        """Why a subschema does not compile by itself; "" if it does."""
        if node is False:
            return _UNSATISFIABLE
        whole = json.dumps(styled({**node, "$defs": self.defs} if self.defs else node))
        self.probes += 1
        self.probed += len(whole) if self.probes > 1 else 0  # the first is the schema itself
        is_late = time.thread_time() - self.began > MAX_SECONDS
        if self.probes > MAX_PROBES or self.probed > MAX_PROBED or is_late:
            raise SchemaError("", "is too complex to be enforced")
        return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(whole), limits=LIMITS)

    def _locate(self, node: Any, unsatisfiable: bool, seen: set[int]) -> Any:
        """The innermost subschema that does not compile."""
        seen.add(id(node))
        for child in _children(node, self.defs):
            if id(child) in seen or not isinstance(child, dict):
                continue
            error = self._error(child)
            if error and error.startswith(_UNSATISFIABLE) == unsatisfiable:
                return self._locate(child, unsatisfiable, seen)
            seen.add(id(child))
        return node

    def _relax(self, node: dict[str, Any]) -> None:
        """Leaves keywords out of the subschema, such that the rest compiles if that is possible.

        Raises SchemaError if there is nothing left to leave out.
        """
        tries = [*_relaxed(node)]
        if not tries:
            raise SchemaError(self.paths.get(id(node), ""), "is too complex to be enforced")
        rest, left_out = next((trial for trial in tries if not self._error(trial[0])), tries[0])
        for key in left_out:
            self._note(node, key)
        node.clear()
        node.update(rest)

    def _note(self, node: dict[str, Any], key: str | int) -> None:
        """key: a keyword of the node, or the index of a schema in its allOf."""
        path = self.paths[id(node)]
        if isinstance(key, int):
            part = node["allOf"][key]
            path = self.paths[id(part)]
            if path != self.paths[id(node)]:
                self.notes[path] = "is not enforced: its grammar would be too complex"
                return
            key = next(name for name in part if name in _OPTIONAL)  # what the node's own keywords are written as
        source = _at(self.source, path)
        names = [name for name in _OPTIONAL[str(key)] if isinstance(source, dict) and name in source] or [str(key)]
        for name in names:
            self.notes[path + escape(name)] = "is not enforced: its grammar would be too complex"


def _relaxed(node: dict[str, Any]) -> Iterator[tuple[dict[str, Any], tuple[str | int, ...]]]:
    """(the subschema without some of its keywords, these keywords), the least important first."""
    for key in _OPTIONAL:
        if key == "patternProperties" and key in node:
            names = "|".join(f"(?:{name})" for name in node[key])
            if any(node[key].values()):
                yield {**node, key: {names: {}}}, (key,)
            yield _without(node, key, "additionalProperties"), (key, *({"additionalProperties"} & node.keys()))
        elif key in node:
            yield _without(node, key), (key,)
    parts = node.get("allOf", [])
    for i in range(len(parts)):
        yield {**node, "allOf": parts[:i] + parts[i + 1 :]}, (i,)


def _without(node: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in keys}


def _children(node: dict[str, Any], defs: dict[str, Any]) -> Iterator[Any]:
    for key in "properties", "patternProperties":
        yield from node.get(key, {}).values()
    for key in "prefixItems", "allOf", "anyOf":
        yield from node.get(key, ())
    for key in "additionalProperties", "items":
        if key in node:
            yield node[key]
    if "$ref" in node:
        yield defs[node["$ref"].removeprefix("#/$defs/")]


def _at(value: Any, path: str) -> Any:
    for step in path.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value
