"""Words, names and tools from which `thalweg.bench.tasks` draws its items, read from `task_pools.json`. Changing any of
it changes every item.
"""

from __future__ import annotations

import json
from importlib import resources
from random import Random
from typing import Any, NamedTuple

import msgspec

JsonValue = str | int | float | bool | list[str]


class ToolParameter(msgspec.Struct, frozen=True):
    """One parameter of a tool."""

    names: tuple[str, str]  # two spellings
    kind: str  # its JSON type
    description: str
    draw: tuple[Any, ...]  # how a value is drawn: a method of `Draws` and its arguments

    def schema(self) -> dict[str, object]:
        """Its JSON schema in the tool list."""
        items = {"items": {"type": "string"}} if self.kind == "array" else {}
        return {"type": self.kind, **items, "description": self.description}


class ToolKind(msgspec.Struct, frozen=True):
    """A tool, and sentences that ask for it (`{0}`, `{1}` … are its arguments in order)."""

    names: tuple[str, str]
    description: str
    parameters: tuple[ToolParameter, ...]
    requests: tuple[str, ...]


_data = json.loads((resources.files("thalweg.bench") / "task_pools.json").read_text(encoding="utf-8"))
TOOL_KINDS = msgspec.convert(_data.pop("tools"), tuple[ToolKind, ...])
POOLS: dict[str, tuple[str, ...]] = {name: tuple(words.split()) for name, words in _data.items()}
RECALL_KEYS, RECALL_VALUES = POOLS["recall_keys"], POOLS["recall_values"]
CITIES, PEOPLE = POOLS["cities"], POOLS["people"]


class Draws(NamedTuple):
    """Each method draws one argument: the words in the request, and the value in the call."""

    rng: Random

    def __call__(self, kind: str, *arguments: Any) -> tuple[str, JsonValue]:
        words, value = getattr(self, kind)(*arguments)
        return words, value

    def pool(self, name: str) -> tuple[str, str]:
        word = self.rng.choice(POOLS[name])
        return word, word

    def phrase(self) -> tuple[str, str]:
        text = f"{self.rng.choice(RECALL_VALUES)} {self.rng.choice(RECALL_KEYS)}"
        return f'"{text}"', text

    def code(self) -> tuple[str, str]:
        letters = "".join(self.rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2))
        text = f"{letters}{self.rng.randrange(1000):03d}"
        return text, text

    def clock(self) -> tuple[str, str]:
        text = f"{self.rng.randrange(24):02d}:{self.rng.choice((0, 15, 30, 45)):02d}"
        return text, text

    def integer(self, low: int, high: int) -> tuple[str, int]:
        value = self.rng.randint(low, high)
        return str(value), value

    def number(self) -> tuple[str, float]:
        value = self.rng.randint(1, 999) + self.rng.choice((0.25, 0.5, 0.75))
        return json.dumps(value), value

    def flag(self, yes: str, no: str) -> tuple[str, bool]:
        value = self.rng.random() < 0.5
        return (yes if value else no), value

    def names(self) -> tuple[str, list[str]]:
        chosen = self.rng.sample(PEOPLE, self.rng.randint(2, 3))
        return ", ".join(chosen[:-1]) + " and " + chosen[-1], chosen
