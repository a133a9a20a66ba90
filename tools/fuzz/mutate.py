"""Mutations of JSON values and of bytes. Bytes are kept as text of the characters 0 to 255, so that inputs are JSON."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

DEEP: Any = 0
for _ in range(160):
    DEEP = [DEEP]
ODD = [
    *(None, True, False, 0, -1, 1, 2, 63, 255, 65536, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1),
    *(10**30, -(10**30), 0.0, -0.0, 0.5, 1e-9, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("", " ", "\0", "a", "0", "-1", "null", "\ud800", "\udfff\ud800", "\u202e", "\ufeff", "é漢😀", "../..", "/", "a" * 5000),
    *("\n" * 300, "(a+)+$", "{{ 1 }}", "<think>", "</think>", "%s", "\\u0000", [], {}, [[]], [{}], {"": None}, DEEP),
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value inside, `value` itself included."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutate_value(value: Any, draw: random.Random, donor: Any) -> Any:
    """A changed copy. donor: another value, of which parts may be taken."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        path = draw.choice(list(places(value))[:5000])
        parent, old = at(value, path[:-1]) if path else None, at(value, path)
        new = _changed(old, draw, donor)
        if parent is None:
            value = new
        elif draw.random() < 0.12:
            del parent[path[-1]]
        elif isinstance(parent, list) and draw.random() < 0.2:
            parent[path[-1] : path[-1]] = [copy.deepcopy(new) for _ in range(draw.choice((1, 1, 2, 70)))]
        else:
            parent[path[-1]] = new
    return value


def _changed(old: Any, draw: random.Random, donor: Any) -> Any:
    kind = draw.random()
    if isinstance(old, (dict, list)) and kind < 0.5:
        other = copy.deepcopy(at(donor, draw.choice(list(places(donor))[:5000])))
        if isinstance(old, dict):
            if isinstance(other, dict) and other:
                name = draw.choice(list(other))
                return old | {name: other[name]}
            return old | {draw.choice([*old, "x", ""]): other}
        return [*old, other]
    if isinstance(old, bool) or old is None or kind < 0.35:
        return copy.deepcopy(draw.choice(ODD))
    if isinstance(old, (int, float)):
        return draw.choice((old + 1, old - 1, -old, old * 2, old * 1000, str(old), [old], old + 0.5, {"": old}))
    if isinstance(old, str):
        cut = draw.randrange(len(old) + 1)
        odd = draw.choice([item for item in ODD if isinstance(item, str)])
        return draw.choice((old[:cut], old[cut:], old[:cut] + odd + old[cut:], old * 2, [old], {old: old}))
    return copy.deepcopy(at(donor, draw.choice(list(places(donor))[:5000])))


def dump(value: Any, draw: random.Random) -> str:
    """JSON text as characters 0 to 255, sometimes with a key twice, or with surrogates as bytes that are not UTF-8."""
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5)
    if isinstance(value, dict) and value and draw.random() < 0.05:
        name = draw.choice(list(value))
        text = "{" + json.dumps(name) + ": " + json.dumps(draw.choice(ODD)) + ", " + text[1:]
    return text.encode("utf-8", "surrogatepass").decode("latin-1")


def mutate_bytes(text: str, draw: random.Random) -> str:
    """A changed copy of bytes, given as characters 0 to 255."""
    start = draw.randrange(len(text) + 1)
    end = min(start + draw.choice((0, 1, 1, 2, 8, 100)), len(text))
    noise = draw.randbytes(draw.choice((0, 1, 1, 2, 8))).decode("latin-1")
    return draw.choice(
        (text[:start], text[start:], text[:start] + noise + text[end:], text[:end] + text[start:], noise * 50, "")
    )
