"""Made-up tools for the task `agents`: names, schemas, values, and requests in words.

Schemas are written as the OpenAI, Anthropic, LangChain, pydantic-ai and openai-agents SDKs send them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from thalweg.bench.task_pools import (
    CITIES,
    PEOPLE,
    POOLS,
    RECALL_KEYS,
    RECALL_VALUES,
    TOOL_KINDS,
    Draws,
    ToolKind,
    ToolParameter,
)

Json = Any
Message = dict[str, Json]

_VERBS = """get find list create delete update send open close start stop check count move copy rename convert compute
translate book order cancel schedule search fetch load save read write print play pause mute lock unlock measure compare
sort rate share pay call set add remove roll draw paint clean fill test plan sell buy hide show track""".split()
_FIELDS = """city name count amount date unit color size title text level price weight email id path days language
country age query topic limit user message file key value code number place time width height speed total status kind
label note target source owner group year month address phone rate score rank""".split()
_SPOKEN_FLAGS = {True: ("true", "yes"), False: ("false", "no")}
_DEFAULTS: Mapping[str, tuple[Json, ...]] = {
    "string": (),
    "integer": (0, 1, 2, 5, 10),
    "number": (0.5, 1.5),
    "boolean": (False, True),
}


def _number(name: str, other: str) -> ToolParameter:
    return ToolParameter((name, other), "integer", "A number", ("integer", 0, 999))


def _string(name: str, other: str, *draw: str) -> ToolParameter:
    return ToolParameter((name, other), "string", f"The {name}", draw or ("phrase",))


# Tools that demonstrations have, beside those of the task `tools`.
_KINDS = (
    *TOOL_KINDS,
    ToolKind(
        ("add", "sum_numbers"),
        "Add two numbers",
        (_number("a", "x"), _number("b", "y")),
        ("What is {0} + {1}?", "What is {0} plus {1}?", "Add {0} and {1}."),
    ),
    ToolKind(
        ("multiply", "product"),
        "Multiply two numbers",
        (_number("a", "x"), _number("b", "y")),
        ("What is {0} times {1}?", "What is {0} * {1}?", "Multiply {0} and {1}.", "Multiply {0} by {1}."),
    ),
    ToolKind(
        ("search", "web_search"),
        "Search the web",
        (_string("query", "text"),),
        ("Search the web for {0}.", "Search for {0}."),
    ),
    ToolKind(
        ("get_population", "lookup"),
        "Get the population of a city",
        (_string("city", "name", "pool", "cities"),),
        ("How many people live in {0}?", "What is the population of {0}?", "How many live in {0}?"),
    ),
    ToolKind(
        ("get_weather", "weather"),
        "Get the weather of a city",
        (_string("city", "location", "pool", "cities"),),
        (
            "What is the weather in {0}?",
            "What's the weather like in {0}?",
            "Weather in {0}?",
            "How is the weather in {0}?",
        ),
    ),
    ToolKind(
        ("get_user", "find_person"),
        "Get the user with a name",
        (_string("name", "user", "pool", "people"),),
        ("Who is {0}?", "Find the user {0}.", "Get the user {0}."),
    ),
)


@dataclass(frozen=True)
class Parameter:
    """A member of an object: its schema, a value for it, and how a request says the value."""

    name: str
    schema: Mapping[str, Json]
    value: Json
    spoken: str
    required: bool = True
    draw: tuple[Json, ...] = ()  # how `Draws` makes another value


@dataclass(frozen=True)
class Tool:
    """A function that is offered, and what a request calls it (empty: its name alone)."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    action: str  # "convert the coin"
    offered: Mapping[str, Json]  # as a client sends it
    requests: tuple[str, ...] = ()  # sentences that ask for it, with the values in order


def compact(value: Json) -> str:
    """JSON without whitespace, as structured output is by default."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class ToolMaker:
    """Draws tools and requests for them."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    # --- words and values --------------------------------------------------------------------------------------------

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def invented(self) -> str:
        """A word that is in no list."""
        word = "".join(
            self.rng.choice("bcdfghjklmnprstvwz") + self.rng.choice("aeiou") for _ in range(self.rng.randint(1, 3))
        )
        return word + self.rng.choice("bdgklmnprstxz")

    def noun(self) -> str:
        return self.invented() if self.chance(0.15) else self.rng.choice(RECALL_KEYS)

    def joined(self, words: Sequence[str]) -> str:
        """Words as an identifier, mostly with underscores."""
        if self.chance(0.2):
            return words[0] + "".join(word.capitalize() for word in words[1:])
        return self.rng.choice(("_", "_", "_", "_", "-")).join(words)

    def text(self) -> tuple[str, str]:
        """A string and its form in a request."""
        kind = self.rng.randrange(6)
        if kind < 2:
            word = self.rng.choice(self.rng.choice((CITIES, PEOPLE, POOLS["currencies"], POOLS["languages"])))
            return word, self.rng.choice((word, f'"{word}"'))
        if kind == 2:
            code = f"{self.rng.choice('ABCDEFGHJKLMNPQRSTUVWXYZ')}{self.rng.randrange(1000):03d}"
            return code, f'"{code}"'
        count = self.rng.randint(1, 4)
        words = " ".join(self.rng.choice((self.rng.choice(RECALL_VALUES), self.noun())) for _ in range(count))
        return words, f'"{words}"'

    def integer(self) -> int:
        return self.rng.randrange(10 ** self.rng.randint(1, 4))

    def number(self) -> float:
        return self.rng.randrange(1000) + self.rng.choice((0.25, 0.5, 0.75))

    def scalar(self) -> Json:
        return self.rng.choice((self.text()[0], self.integer(), self.number(), self.chance(0.5)))

    def typed(self, depth: int = 1) -> tuple[dict[str, Json], Json, str]:
        """A schema, a value of it, and its form in a request."""
        kind = self.rng.choices(
            ("string", "integer", "number", "boolean", "enum", "array", "object", "nullable"),
            (40, 20, 8, 10, 10, 7 * depth, 5 * depth, 5 * depth),
        )[0]
        if kind == "string":
            value, spoken = self.text()
            return {"type": "string"}, value, spoken
        if kind == "integer":
            low: dict[str, Json] = {"minimum": 0} if self.chance(0.15) else {}
            count = self.integer()
            return {"type": "integer", **low}, count, str(count)
        if kind == "number":
            number = self.number()
            return {"type": "number"}, number, json.dumps(number)
        if kind == "boolean":
            flag = self.chance(0.5)
            return {"type": "boolean"}, flag, self.rng.choice(_SPOKEN_FLAGS[flag])
        if kind == "enum":
            options = self.rng.sample(RECALL_VALUES, self.rng.randint(2, 4))
            chosen = self.rng.choice(options)
            return {"enum": options, "type": "string"}, chosen, self.rng.choice((chosen, f'"{chosen}"'))
        if kind == "array":
            return self._array()
        if kind == "object":
            members = self.parameters(self.rng.randint(1, 3), depth=0, optional=False)
            whole = {member.name: member.value for member in members}
            return self.schema(members, 0), whole, json.dumps(whole, ensure_ascii=False)
        schema, one, said = self.typed(0)
        return {"anyOf": [schema, {"type": "null"}], "default": None}, one, said

    def _array(self) -> tuple[dict[str, Json], Json, str]:
        if self.chance(0.3):
            numbers = [self.integer() for _ in range(self.rng.randint(1, 4))]
            return {"items": {"type": "integer"}, "type": "array"}, numbers, json.dumps(numbers)
        words = [self.text()[0] for _ in range(self.rng.randint(1, 3))]
        quoted = [f'"{word}"' for word in words]
        listed = ", ".join(quoted[:-1]) + " and " + quoted[-1] if len(words) > 1 else quoted[0]
        spoken = self.rng.choice((listed, json.dumps(words, ensure_ascii=False)))
        return {"items": {"type": "string"}, "type": "array"}, words, spoken

    # --- schemas and tools -------------------------------------------------------------------------------------------

    def parameters(self, count: int, depth: int = 1, optional: bool = True) -> tuple[Parameter, ...]:
        names: dict[str, None] = {}
        while len(names) < count:
            word = self.noun() if self.chance(0.3) else self.rng.choice(_FIELDS)
            lead = self.rng.choice((*_FIELDS, "max", "is", "new", "first")) if self.chance(0.2) else ""
            names[self.joined([lead, word]) if lead and lead != word else word] = None
        made = []
        for name in names:
            schema, value, spoken = self.typed(depth)
            required = not optional or ("anyOf" not in schema and self.chance(0.8))
            if not required and schema.get("type") in _DEFAULTS and self.chance(0.7):
                schema = {"default": self._default(schema), **schema}
            if self.chance(0.35):
                schema |= {"description": self._about(name)}
            made.append(Parameter(name, schema, value, spoken, required))
        return tuple(made)

    def _default(self, schema: Mapping[str, Json]) -> Json:
        if "enum" in schema:
            return schema["enum"][0]
        kind = schema["type"]
        return self.noun() if kind == "string" else self.rng.choice(_DEFAULTS[kind])

    def _about(self, name: str) -> str:
        words = spaced(name)
        return self.rng.choice(
            (f"The {words}", f"The {words} of the {self.noun()}", words.capitalize(), f"Which {words}")
        )

    def schema(self, parameters: Sequence[Parameter], style: int) -> dict[str, Json]:
        """style: 0 LangChain's, 1 pydantic-ai's, 2 openai-agents', 3 written by hand."""
        members = {
            p.name: {**p.schema, "title": spaced(p.name).title()} if style == 2 else dict(p.schema) for p in parameters
        }
        required = [p.name for p in parameters if p.required or style == 2]
        if style == 0:
            return {"properties": members, "required": required, "type": "object"}
        if style == 1:
            return {"additionalProperties": False, "properties": members, "required": required, "type": "object"}
        if style == 2:
            title = self.noun().capitalize()
            whole = {"properties": members, "required": required, "title": title, "type": "object"}
            return whole | {"additionalProperties": False}
        return {"type": "object", "properties": members, "required": required} | (
            {"additionalProperties": False} if self.chance(0.2) else {}
        )

    def tool(self, style: int, taken: set[str]) -> Tool:
        if self.chance(0.2) and (tool := self.known(style, taken)):
            return tool
        while True:
            verb, noun = self.rng.choice(_VERBS), self.noun()
            adjective = self.rng.choice(RECALL_VALUES) if self.chance(0.15) else ""
            words = [word for word in (verb, adjective, noun) if word]
            action = " ".join((verb, self.rng.choice(("the", "a")), *words[1:]))
            name = self.joined(words)
            if self.chance(0.12):  # a name that says nothing
                name, action = self.invented() if self.chance(0.7) else noun, ""
            elif self.chance(0.06):
                name = f"{self.noun()}.{name}"
            if not {name, noun} & taken:
                break
        taken |= {name, noun}
        sentence = action.capitalize() or f"{noun.capitalize()} {self.rng.choice(RECALL_KEYS)}"
        described = self.rng.choice(
            (f"{sentence}.", sentence, f"{sentence}. Give the {self.rng.choice(_FIELDS)}.", f"{sentence}.")
        )
        count = self.rng.choices((0, 1, 2, 3, 4), (8, 35, 32, 17, 8))[0]
        return self.offer(
            name, "" if action and self.chance(0.12) else described, self.parameters(count), action, style
        )

    def known(self, style: int, taken: set[str]) -> Tool | None:
        """A tool of `_KINDS`, perhaps under a name of its own; None if there is one like it."""
        kind = self.rng.choice(_KINDS)
        words = {kind.names[0], *kind.names[0].split("_")[-1:]}
        if words & taken:
            return None
        taken |= words
        draws, parameters = Draws(self.rng), list[Parameter]()
        for p in kind.parameters:
            spoken, value = draws(*p.draw)
            schema = dict(p.schema())
            if self.chance(0.6):
                del schema["description"]
            parameters.append(Parameter(self.rng.choice(p.names), schema, value, spoken, draw=p.draw))
        name = self.invented() if self.chance(0.2) else self.rng.choice(kind.names)
        description = kind.description + self.rng.choice(("", "."))
        return replace(self.offer(name, description, tuple(parameters), "", style), requests=kind.requests)

    def offer(self, name: str, description: str, parameters: tuple[Parameter, ...], action: str, style: int) -> Tool:
        if style == 2:
            parameters = tuple(replace(p, required=True) for p in parameters)
        function: dict[str, Json] = {
            "name": name,
            "description": description,
            "parameters": self.schema(parameters, style),
        }
        if style == 2:
            function["parameters"]["title"] = f"{name}_args"
        if style == 2 or self.chance(0.1):
            function["strict"] = True
        return Tool(name, description, parameters, action, {"type": "function", "function": function})

    # --- requests ----------------------------------------------------------------------------------------------------

    def redrawn(self, tool: Tool) -> Tool:
        """The tool with other values."""
        return replace(tool, parameters=tuple(self._redrawn(p) for p in tool.parameters))

    def _redrawn(self, parameter: Parameter) -> Parameter:
        kind = parameter.schema.get("type")
        if parameter.draw:
            spoken, value = Draws(self.rng)(*parameter.draw)
            return replace(parameter, value=value, spoken=spoken)
        if "enum" in parameter.schema:
            value = self.rng.choice(parameter.schema["enum"])
            return replace(parameter, value=value, spoken=f'"{value}"')
        if kind == "string":
            value, spoken = self.text()
            return replace(parameter, value=value, spoken=spoken)
        if kind == "integer":
            value = self.integer()
            return replace(parameter, value=value, spoken=str(value))
        return parameter

    def ask(self, tool: Tool) -> tuple[str, dict[str, Json]]:
        """A request for one call, and the call's arguments."""
        if tool.requests:
            sentence = self.rng.choice(tool.requests).format(*(p.spoken for p in tool.parameters))
            return sentence, {p.name: p.value for p in tool.parameters}
        said, arguments = [], dict[str, Json]()
        for p in tool.parameters:
            has_default = "default" in p.schema
            if (p.required and not (has_default and self.chance(0.5))) or (not p.required and self.chance(0.5)):
                said.append(p)
                arguments[p.name] = p.value
            elif p.required:
                arguments[p.name] = p.schema["default"]
        named = not tool.action or self.chance(0.12)
        action = f"{self.rng.choice(('use', 'call', 'run'))} {tool.name}" if named else tool.action
        lead = self.rng.choice(("{a}", "{a}", "please {a}", "I want you to {a}", "can you {a}", "now {a}")).format(
            a=action
        )
        lead = lead[0].upper() + lead[1:]
        if not said:
            return f"{lead}{self.rng.choice('.?!')}", arguments
        if len(said) == 1 and self.chance(0.4):
            return f"{lead} {self.rng.choice(('for', 'with', 'in', 'of'))} {said[0].spoken}.", arguments
        form = self.rng.choice(("{n} {v}", "{n} {v}", "{n} = {v}", "{n}: {v}", "the {n} is {v}"))
        spoken = [form.format(n=self.rng.choice((spaced(p.name), p.name)), v=p.spoken) for p in said]
        if form.startswith("the"):
            return f"{lead}. " + " ".join(f"{text[0].upper()}{text[1:]}." for text in spoken), arguments
        joint = self.rng.choice((", ", " and ", "; "))
        return f"{lead} {self.rng.choice(('with', 'with', 'for', 'where'))} {joint.join(spoken)}.", arguments

    def result(self) -> str:
        """What a tool gives back: text, a number or JSON."""
        kind = self.rng.randrange(8)
        if kind == 0:
            return str(self.integer())
        if kind == 1:
            return json.dumps(self.rng.choice((self.number(), self.chance(0.5))))
        if kind in (2, 3):
            return self.dumped({self.rng.choice(_FIELDS): self.scalar() for _ in range(self.rng.randint(1, 4))})
        if kind == 4:
            return self.dumped([self.text()[0] for _ in range(self.rng.randint(1, 4))])
        if kind == 5:
            return self.rng.choice(("Done.", "ok", "", "null", "Success", f"Error: no such {self.noun()}", "Not found"))
        words = [
            self.rng.choice((self.noun(), self.rng.choice(RECALL_VALUES), str(self.rng.randrange(100))))
            for _ in range(self.rng.randint(2, 9))
        ]
        if self.chance(0.4):
            words.insert(1, f"in {self.rng.choice(CITIES)}")
        return " ".join(words).capitalize() + self.rng.choice(("", ".", " C"))

    def dumped(self, value: Json) -> str:
        return compact(value) if self.chance(0.5) else json.dumps(value, ensure_ascii=False)


def spaced(name: str) -> str:
    """The words of an identifier."""
    return "".join(f" {c.lower()}" if c.isupper() else " " if c in "_-." else c for c in name).strip()


def plain_value(schema: Mapping[str, Json]) -> Json:
    """What stands for a member that nothing is said about: its default, or the least value."""
    if "default" in schema:
        return schema["default"]
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {
            name: plain_value(member) for name, member in schema["properties"].items() if name in schema["required"]
        }
    return {"string": "unknown", "integer": 0, "number": 0, "boolean": False, "array": []}[schema["type"]]
