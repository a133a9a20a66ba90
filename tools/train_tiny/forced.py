"""Answers in a form that the prompt does not name, as a grammar forces them: what teaches that such texts end.

A grammar lets the model choose what it likes of what the form allows. Where the prompt shows no schema, or a form has
no bound (`{"type": "json_object"}`, arrays without `maxItems`, `[0-9]+`), only the model can make an end.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from thalweg.bench.agent_tools import ToolMaker, compact
from thalweg.bench.task_pools import CITIES, PEOPLE, POOLS, RECALL_KEYS, RECALL_VALUES
from tools.train_tiny.smalltalk import draw_smalltalk

Json = Any

_COUNTS = ("one", "two", "three", "four", "five")
_PLURALS = {"cities": CITIES, "people": PEOPLE, "names": PEOPLE, "colors": (), "words": (), "things": (), "numbers": ()}
_NUMBERED = ("age", "count", "amount", "days", "year", "month", "number", "level", "rank", "score", "total", "size",
             "id")  # fmt: skip
_MEASURED = ("price", "weight", "rate", "height", "speed", "width", "x", "y", "temperature")
_PLACED = ("city", "place", "location", "country", "address")
_PERSONAL = ("name", "user", "owner", "author", "person", "first_name")
_FLAGGED = ("active", "is_new", "ready", "done", "valid")
_SAID = ("text", "title", "message", "note", "label", "description", "explanation", "output", "answer", "final_answer",
         "summary", "result", "reason", "query", "topic")  # fmt: skip
_LISTED = ("tags", "items", "names", "steps", "cities", "colors", "values", "people", "ingredients")
_KEYS = (*_NUMBERED, *_MEASURED, *_PLACED, *_PERSONAL, *_FLAGGED, *_SAID, "email", "color", "date", "code", "kind")
_FACTS = ("{name} is {age}.", "{name} is {age} years old.", "{name}, {age} years old, {city}.",
          "Tell me about {name}, who is {age}.", "I have an email from {name}, {age}, {city}.",
          "{name} lives in {city}.", "My name is {name} and I live in {city}.", "{name} ({age}) from {city}")  # fmt: skip
_WANTS = ("Make up a person.", "Give me an example.", "Give me a JSON object.", "Extract it as JSON.",
          "Write a recipe.", "Solve {a}x + {b} = {c}.",
          "List some {key}s.", "Give me a {key} and its {field}.", "Describe {city}.",
          "Answer as JSON: what is the {field}?", "Write a query for the {key}.", "What is {a} times {b}?",
          "What is {a} + {b}?", "Compute {a} * ({b} + {c}).", "Generate an email address for {person}.",
          "Reply with JSON.", "Return the {field} of the {key}.", "Classify this: the {key} is {value}.")  # fmt: skip


class Forced:
    """Draws a question and an answer in some form."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.maker = ToolMaker(rng)

    def draw(self) -> tuple[str, str]:
        """The question, and the answer of which the first token is the form's, not the model's."""
        kind = self.rng.choices(("object", "array", "asked", "facts", "other"), (30, 12, 10, 18, 30))[0]
        if kind == "asked":
            return self._asked()
        if kind == "facts":
            return self._facts()
        if kind == "other":
            return self._question(), self._other()
        return self._question(), self._dumped(self._object(2) if kind == "object" else self._array(2))

    def _question(self) -> str:
        if self.rng.random() < 0.4:
            return draw_smalltalk(self.rng)[0]
        words = {"key": RECALL_KEYS, "value": RECALL_VALUES, "field": _KEYS, "city": CITIES, "person": PEOPLE}
        drawn = {name: self.rng.choice(pool) for name, pool in words.items()}
        numbers = {name: self.rng.randrange(100) for name in "abc"}
        return self.rng.choice(_WANTS).format(**drawn, **numbers)

    def _asked(self) -> tuple[str, str]:
        """As many things as the question wants."""
        what, pool = self.rng.choice(tuple(_PLURALS.items()))
        count = self.rng.randint(1, 5)
        if what == "numbers":
            values: list[Json] = self.rng.sample(range(100), count)
        else:
            values = self.rng.sample(pool or RECALL_VALUES, count)
        verb = self.rng.choice(("Name", "List", "Give me", "Write"))
        value: Json = values if self.rng.random() < 0.6 else {self.rng.choice((what, *_LISTED)): values}
        return f"{verb} {_COUNTS[count - 1]} {what if count > 1 else what.removesuffix('s')}.", self._dumped(value)

    def _facts(self) -> tuple[str, str]:
        """Members of which the question gives the values."""
        known = {"name": self.rng.choice(PEOPLE), "age": self.rng.randint(1, 99), "city": self.rng.choice(CITIES)}
        text = self.rng.choice(_FACTS)
        said = [key for key in known if f"{{{key}}}" in text]
        names = said + ([key for key in known if key not in said] if self.rng.random() < 0.3 else [])
        value: Json = {key: known[key] if key in said else ("unknown" if key != "age" else 0) for key in names}
        for _ in range(self.rng.choice((0, 0, 1))):
            key = self.rng.choice(_KEYS)
            value.setdefault(key, self._value(key))
        return text.format(**known), self._dumped([value] if self.rng.random() < 0.15 else value)

    def _dumped(self, value: Json) -> str:
        form = self.rng.random()
        if form < 0.7:
            return compact(value)
        return json.dumps(value, ensure_ascii=False, indent=2 if form > 0.9 else None)

    def _object(self, depth: int) -> Json:
        names = self.rng.sample(_KEYS, self.rng.choices((1, 2, 3, 4), (35, 35, 20, 10))[0])
        members = {name: self._value(name) for name in names}
        if depth and self.rng.random() < 0.3:
            members[self.rng.choice((*_LISTED, self.rng.choice(RECALL_KEYS)))] = (
                self._array(depth - 1) if self.rng.random() < 0.7 else self._object(depth - 1)
            )
        if self.rng.random() < 0.3:
            members = dict(self.rng.sample(list(members.items()), len(members)))
        return members

    def _array(self, depth: int) -> Json:
        count = self.rng.choices((0, 1, 2, 3, 4), (6, 34, 30, 20, 10))[0]
        kind = self.rng.random()
        if depth and kind < 0.3:
            names = self.rng.sample(_KEYS, self.rng.randint(1, 3))
            return [{name: self._value(name) for name in names} for _ in range(count)]
        if kind < 0.5:
            return self.rng.sample(range(100), count)
        return self.rng.sample(self.rng.choice((CITIES, PEOPLE, RECALL_VALUES, RECALL_KEYS)), count)

    def _value(self, key: str) -> Json:
        """A value as its name suggests; sometimes of another kind, since a schema may want that."""
        if self.rng.random() < 0.1:
            return self.rng.choice((None, self.maker.scalar()))
        if key in _NUMBERED:
            return self.maker.integer()
        if key in _MEASURED:
            return self.rng.choice((self.rng.randrange(100), self.maker.number(), self.rng.randrange(100) / 10))
        if key in _FLAGGED:
            return self.rng.random() < 0.5
        if key in _PLACED:
            return self.rng.choice(CITIES)
        if key in _PERSONAL:
            return self.rng.choice(PEOPLE)
        if key == "email":
            return self._email()
        if key == "date":
            return f"20{self.rng.randrange(30):02d}-{self.rng.randint(1, 12):02d}-{self.rng.randint(1, 28):02d}"
        if key in _SAID:
            sentence = f"The {self.rng.choice(RECALL_KEYS)} is {self.rng.choice(RECALL_VALUES)}."
            return self.rng.choice((sentence, self.rng.choice(RECALL_VALUES), "unknown"))
        return self.rng.choice((self.rng.choice(RECALL_VALUES), self.rng.choice(RECALL_KEYS), "unknown"))

    def _email(self) -> str:
        return f"{self.rng.choice(PEOPLE).lower()}@{self.rng.choice(RECALL_KEYS)}.{self.rng.choice(('com', 'org'))}"

    def _other(self) -> str:
        """A short text in a form other than JSON."""
        number, word = self.rng.randrange, self.rng.choice
        some = self.rng.choices((1, 2, 3, 4), (40, 35, 15, 10))[0]
        columns = self.rng.sample((*_KEYS, "col_1", "col_2", "column_3"), some)
        operator = word(("+", "+", "-", "*", " + ", " - ", " * ", "/"))
        numbers = (str(number(10 ** self.rng.randint(1, 4))) for _ in range(some + 1))
        if self.rng.random() < 0.25:  # where a grammar wants an operator, digits alone would never end
            return operator.join(numbers)
        forms = (
            str(number(10 ** self.rng.randint(1, 5))),
            f"({number(100)} {word('+-*')} {number(100)}) {word('+-*')} {number(100)}",
            f"{word(('SELECT', 'select'))} {', '.join(columns)} from {word((*RECALL_KEYS, 'table_1', 'table_2'))}",
            f"SELECT {', '.join(columns)} FROM {word(RECALL_KEYS)} WHERE {word(_KEYS)} = {number(100)}",
            self._email(),
            ".".join(str(number(256)) for _ in range(4)),
            f"{number(100)}{word('.,')}{number(100)}",
            f"20{number(30):02d}-{self.rng.randint(1, 12):02d}-{self.rng.randint(1, 28):02d}",
            f"{number(24):02d}:{number(60):02d}",
            word((", ", ",", "\n", "; ")).join(self.rng.sample(word((CITIES, PEOPLE, RECALL_VALUES)), some)),
            word(word((CITIES, PEOPLE, RECALL_VALUES, RECALL_KEYS, POOLS["languages"]))),
            "-".join(str(number(10 ** self.rng.randint(2, 4))) for _ in range(some)),
            f"{word(RECALL_KEYS)}({', '.join(str(number(100)) for _ in range(some))})",
            f"{word(_KEYS)} = {number(100)}",
            f"<{columns[0]}>{word(RECALL_VALUES)}</{columns[0]}>",
            "\n".join(f"{name}: {word(RECALL_VALUES)}" for name in columns),
        )
        return word(forms)
