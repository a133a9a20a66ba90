"""The schemas of pydantic's types as grammars: they compile, and what they let through is a value of the type."""

from __future__ import annotations

import dataclasses
import enum
import json
import random
import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar, Union
from uuid import UUID

import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, TypeAdapter, conint, conlist, constr
from typing_extensions import TypedDict

from thalweg.core.grammar import Grammar
from thalweg.text.grammar import check
from tools.schema_suite import COMPILER, walk

T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")
    x: int
    y: float = 0.5


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[str]


class Page(BaseModel, Generic[T]):
    items: list[T]
    total: int = Field(ge=0)


class Movie(TypedDict, total=False):
    title: str
    year: int


@dataclasses.dataclass
class Order:
    item: str
    count: int = 1


class Span(NamedTuple):
    begin: int
    end: int


class Names(RootModel[list[str]]):
    pass


class Bounded(BaseModel):
    ratio: float = Field(gt=0, lt=1)
    even: int = Field(multiple_of=2, ge=0, le=100)
    code: str = Field(pattern="^[A-Z]{2}-[0-9]+$", max_length=8)


Pet = Annotated[Union[Cat, Dog], Field(discriminator="kind")]
TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "None": None,
    "Any": Any,
    "bytes": bytes,
    "Decimal": Decimal,
    "datetime": datetime,
    "date": date,
    "time": time,
    "timedelta": timedelta,
    "UUID": UUID,
    "AnyUrl": pydantic.AnyUrl,
    "HttpUrl": pydantic.HttpUrl,
    "IPv4Address": IPv4Address,
    "IPv6Address": IPv6Address,
    "Path": Path,
    "Pattern": re.Pattern,
    "Json": pydantic.Json[dict[str, int]],
    "SecretStr": pydantic.SecretStr,
    "constr": constr(min_length=2, max_length=5, pattern="^[a-z]+$"),
    "conint": conint(gt=0, le=10, multiple_of=2),
    "conlist": conlist(int, min_length=1, max_length=3),
    "set": set[int],
    "frozenset": frozenset[str],
    "tuple": tuple[int, str, bool],
    "tuple of any length": tuple[int, ...],
    "Literal": Literal["a", 1, True],
    "Enum": Colour,
    "IntEnum": Level,
    "Union": Union[int, str, None],
    "Optional": Optional[Point],
    "discriminated union": TypeAdapter(Pet),
    "recursive model": Tree,
    "generic model": Page[Point],
    "dict[str, int]": dict[str, int],
    "dict[int, str]": dict[int, str],
    "dict[Enum, list]": dict[Colour, list[list[int]]],
    "RootModel": Names,
    "TypedDict": Movie,
    "dataclass": Order,
    "NamedTuple": Span,
    "bounds": Bounded,
}
# An expression may be malformed, a set's items may be equal, a dict's keys may be no members of the enum.
NAMED = {"Pattern": "format", "set": "uniqueItems", "frozenset": "uniqueItems", "dict[Enum, list]": "propertyNames"}
# What JSON Schema cannot say of these: their strings are any text, their keys any string, their values any number.
LOOSE = {"Json", "dict[int, str]", "Decimal", "float", "Any", "timedelta", "HttpUrl", *NAMED}


@pytest.mark.parametrize("name", TYPES)
def test_a_type_compiles_and_its_outputs_are_valid(name: str) -> None:
    kind = TYPES[name]
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    grammar = Grammar("json_schema", json.dumps(adapter.json_schema()), field="schema", strict=name not in NAMED)
    notes = check(grammar)
    assert [note.partition(" ")[0].rpartition("/")[2] for note in notes] == ([NAMED[name]] if name in NAMED else [])
    matcher, rng = COMPILER.compile(grammar), random.Random(3)
    texts = [text for text in (walk(matcher, rng) for _ in range(30)) if text is not None]
    assert texts
    for text in texts:
        json.loads(text)
        if name not in LOOSE:
            adapter.validate_json(text)


def test_the_sdks_strict_form_of_a_model_compiles() -> None:
    from openai.lib._pydantic import to_strict_json_schema

    for model in Tree, Page[Point], Bounded:
        assert check(Grammar("json_schema", json.dumps(to_strict_json_schema(model)), strict=True)) == ()
