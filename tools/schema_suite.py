"""Runs a suite of JSON schemas with instances: which schemas compile, and what the grammars accept.

python -m tools.schema_suite --suite FOLDER … --name NAME --commit HASH --json RESULT

The folder has the files of maskbench (https://github.com/guidance-ai/jsonschemabench, `maskbench/data`), or those of the
JSON Schema Test Suite (https://github.com/json-schema-org/JSON-Schema-Test-Suite, `tests/draft2020-12`, …); the format
of a file tells which. It needs jsonschema_rs, which comes with schemathesis.

An instance is written in the order and style that the grammar has. An accepted instance must be valid for the schema
without the keywords that the grammar's notes name; one that is not is unsound.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.text.grammar import GrammarCompiler, GrammarMatcher
from thalweg.text.json_schema import SchemaError
from thalweg.text.schema_grammar import EnforceableSchema, enforceable

MAX_TRIES = 500  # steps to find an order of keys
WALKS, WALK_BYTES = 3, 400


class ByteTokenizer:
    """256 tokens of one byte each, and the end token."""

    vocab_size, bos_id, added_ids = 257, None, (256,)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<end>"

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())


COMPILER = GrammarCompiler(ByteTokenizer(), 257, [256])  # type: ignore[arg-type]


class Case(NamedTuple):
    name: str
    schema: Any
    tests: list[tuple[Any, bool]]  # (instance, is it valid)


class Outcome(NamedTuple):
    name: str
    refused: str  # why the schema is refused, or ""
    notes: tuple[str, ...]
    compile_ms: float
    unsound: list[str]  # accepted texts that break an unnamed keyword
    counts: Counter[str]


def cases(folder: Path) -> Iterator[Case]:
    for path in sorted(folder.rglob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document, dict):
            tests = [(test["data"], test["valid"]) for test in document.get("tests", ())]
            yield Case(path.stem, document["schema"], tests)
        else:
            for i, group in enumerate(document):
                tests = [(test["data"], test["valid"]) for test in group["tests"]]
                yield Case(f"{path.stem}#{i} {group['description']}", group["schema"], tests)


def run(case: Case) -> Outcome:
    began = time.perf_counter()
    try:
        source = json.dumps(case.schema)
        matcher = COMPILER.compile(Grammar("json_schema", source, field=""))
        read = enforceable(source)
    except (InvalidRequest, SchemaError) as error:
        return Outcome(case.name, str(error), (), 1e3 * (time.perf_counter() - began), [], Counter())
    spent = 1e3 * (time.perf_counter() - began)
    counts: Counter[str] = Counter()
    unsound: list[str] = []
    try:
        relaxed = jsonschema_rs.validator_for(without(case.schema, read))
        exact = jsonschema_rs.validator_for(case.schema)
    except (ValueError, jsonschema_rs.ReferencingError):
        counts["schemas that the reference validator refuses"] += 1
        return Outcome(case.name, "", tuple(read.notes), spent, [], counts)

    def judge(value: Any, text: str, source: str) -> None:
        if source == "random" and re.search(r"\d{16}|[eE][+-]?\d", text):  # beyond float64: the validator rounds them
            counts["random outputs with huge numbers"] += 1
        elif not relaxed.is_valid(value):
            unsound.append(f"{source}: {text[:300]}")
        elif not exact.is_valid(value):
            counts["accepted, breaks a named keyword"] += 1

    for value, valid in case.tests:
        text = accepted_text(matcher, value, read)
        counts[f"{'valid' if valid else 'invalid'} instances"] += 1
        if text is not None:
            counts["invalid accepted"] += not valid
            judge(value, text, "instance")
        elif valid:
            counts["valid rejected"] += 1
    rng = random.Random(case.name)
    for _ in range(WALKS):
        text = walk(matcher, rng)
        if text is not None:
            counts["random outputs"] += 1
            judge(json.loads(text), text, "random")
    return Outcome(case.name, "", tuple(f"{k} {v}" for k, v in read.notes.items()), spent, unsound, counts)


def without(schema: Any, read: EnforceableSchema) -> Any:
    """The schema without the keywords that the notes name."""
    schema = copy.deepcopy(schema)
    for path in sorted(read.notes, key=len, reverse=True):
        *steps, last = [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]
        node = schema
        for step in steps:
            node = node[int(step)] if isinstance(node, list) else node[step]
        if last == "oneOf":
            node["anyOf" if "anyOf" not in node else "x"] = node.pop("oneOf")
        elif last == "patternProperties":  # the names still count for additionalProperties
            node[last] = dict.fromkeys(node[last], True)
        elif isinstance(node, list):
            node[int(last)] = True
        elif last in ("if", "contains"):
            for name in ("then", "else") if last == "if" else ("minContains", "maxContains"):
                node.pop(name, None)
            node.pop(last)
        else:
            node.pop(last, None)
    return schema


def accepted_text(matcher: GrammarMatcher, value: Any, read: EnforceableSchema) -> str | None:
    """The value as a text that the matcher accepts, with the keys in an order that it wants. None if there is none."""
    order: dict[str, int] = {}
    _names(read.schema, read.schema.get("$defs", {}), order, set())
    budget = [MAX_TRIES]
    for state, text in _write(matcher.copy(), value, order, budget):
        if state.state.is_accepting():
            return text
    return None


def _names(node: Any, defs: dict[str, Any], order: dict[str, int], seen: set[int]) -> None:
    """Numbers the names of members by where they first occur."""
    if isinstance(node, list):
        for child in node:
            _names(child, defs, order, seen)
    if not isinstance(node, dict) or id(node) in seen:
        return
    seen.add(id(node))
    for key, child in node.items():
        if key == "properties":
            for name, member in child.items():
                order.setdefault(name, len(order))
                _names(member, defs, order, seen)
        elif key == "$ref":
            _names(defs[child.removeprefix("#/$defs/")], defs, order, seen)
        elif key not in ("$defs", "enum", "const"):
            _names(list(child.values()) if key == "patternProperties" else child, defs, order, seen)
            for name in child if key == "required" else ():
                order.setdefault(name, len(order))


def _write(
    state: GrammarMatcher, value: Any, order: dict[str, int], budget: list[int]
) -> Iterator[tuple[GrammarMatcher, str]]:
    """(state after a text of the value, the text), for each order of keys that the grammar allows."""
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: order.get(name, len(order)))
        for after, text in _take(state, "{", budget):
            yield from _members(after, text, value, names, order, budget)
    elif isinstance(value, list):
        yield from _items(state, "[", value, order, budget)
    else:
        yield from _take(state, json.dumps(value, ensure_ascii=False), budget)


def _take(state: GrammarMatcher, text: str, budget: list[int]) -> Iterator[tuple[GrammarMatcher, str]]:
    budget[0] -= 1
    if budget[0] > 0:
        after = state.copy()
        if after.accept(list(text.encode("utf-8", "replace"))):
            yield after, text


def _members(
    state: GrammarMatcher, text: str, value: Any, names: list[str], order: dict[str, int], budget: list[int]
) -> Iterator[tuple[GrammarMatcher, str]]:
    if not names:
        yield from ((after, text + end) for after, end in _take(state, "}", budget))
    comma = "" if text == "{" else ", "
    for i, name in enumerate(names):
        for after, key in _take(state, comma + json.dumps(name, ensure_ascii=False) + ": ", budget):
            for done, member in _write(after, value[name], order, budget):
                rest = names[:i] + names[i + 1 :]
                yield from _members(done, text + key + member, value, rest, order, budget)


def _items(
    state: GrammarMatcher, text: str, values: list[Any], order: dict[str, int], budget: list[int]
) -> Iterator[tuple[GrammarMatcher, str]]:
    for after, mark in (
        _take(state, "[" if text == "[" else ", " if values else "]", budget) if values or text != "[" else ()
    ):
        if not values:
            yield after, text + mark
            return
        start = mark if text == "[" else text + mark
        for done, item in _write(after, values[0], order, budget):
            yield from _items(done, start + item, values[1:], order, budget)
    if not values and text == "[":
        yield from _take(state, "[]", budget)


def walk(matcher: GrammarMatcher, rng: random.Random) -> str | None:
    """A random text of the grammar; None if it does not end in time."""
    state, out = matcher.copy(), bytearray()
    while len(out) < WALK_BYTES:
        forced = state.state.compute_ff_bytes()
        if forced:
            out += forced
            if not state.accept(list(forced)):
                return None
            continue
        mask = state.state.compute_bitmask()
        allowed = [i for i in range(257) if mask[i >> 3] >> (i & 7) & 1]
        if 256 in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return out.decode()
        closing = [i for i in allowed if chr(i) in '"}]'] if len(out) > WALK_BYTES // 4 else []
        allowed = [i for i in allowed if 0x20 <= i < 0x7F or i == 10] or [i for i in allowed if i != 256]
        if not allowed:
            return None
        token = rng.choice(closing if closing and rng.random() < 0.8 else allowed)
        if not state.accept([token]):
            return None
        out.append(token)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, nargs="+", required=True, help="folders of the suite's files")
    parser.add_argument("--name", default="", help="of the suite, for the result")
    parser.add_argument("--commit", default="", help="of the suite, for the result")
    parser.add_argument("--sample", type=int, default=0, help="take only so many schemas, at random")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    wanted = [case for folder in options.suite for case in cases(folder)]
    if options.sample:
        wanted = random.Random(0).sample(wanted, min(options.sample, len(wanted)))
    with ProcessPoolExecutor(options.processes) as pool:
        outcomes = list(pool.map(run, wanted, chunksize=20))
    result = summary(outcomes, options)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


def summary(outcomes: list[Outcome], options: argparse.Namespace) -> dict[str, Any]:
    times = sorted(outcome.compile_ms for outcome in outcomes)
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    refused = [outcome for outcome in outcomes if outcome.refused]
    keywords = Counter(keyword for outcome in outcomes for keyword in {_keyword(note) for note in outcome.notes})
    return {
        "suite": options.name,
        "commit": options.commit,
        "schemas": len(outcomes),
        "compile": len(outcomes) - len(refused),
        "compile_percent": round(100 * (1 - len(refused) / len(outcomes)), 2),
        "with_notes": sum(bool(outcome.notes) for outcome in outcomes),
        "unsound": sum(len(outcome.unsound) for outcome in outcomes),
        "compile_ms": {f"p{q}": round(times[min(len(times) * q // 100, len(times) - 1)], 1) for q in (50, 99, 100)},
        **counts,
        "noted_keywords": dict(keywords.most_common()),
        "refused": {outcome.name: outcome.refused[:200] for outcome in refused},
        "unsound_cases": {outcome.name: outcome.unsound for outcome in outcomes if outcome.unsound},
    }


def _keyword(note: str) -> str:
    return [step for step in note.partition(" ")[0].split("/") if not step.isdigit()][-1]


if __name__ == "__main__":
    main()
