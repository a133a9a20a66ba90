"""An answer as its parts in order: thoughts, texts, tool calls; and the events that build it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class PartKind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, eq=False)
class Part:
    """A part of an answer. One part is open at a time."""

    kind: PartKind
    index: int  # in the answer
    id: str = ""  # of a call, as name and number
    name: str = ""
    number: int = 0  # among the calls
    whole: bool = True  # False: the call was malformed or broken off, and its arguments were only closed
    deltas: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of a call: its arguments, one JSON object once it is closed."""
        return "".join(self.deltas)


class Event(NamedTuple):
    type: Literal["open", "delta", "close"]
    part: Part
    text: str = ""  # of a delta


class ParsedCall(NamedTuple):
    id: str
    name: str
    arguments: str


class ParsedAnswer(NamedTuple):
    content: str | None
    reasoning: str | None
    calls: tuple[ParsedCall, ...]


def answer_of(parts: Sequence[Part]) -> ParsedAnswer:
    texts: dict[PartKind, str] = {}
    for part in parts:
        texts[part.kind] = texts.get(part.kind, "") + part.text
    calls = tuple(ParsedCall(part.id, part.name, part.text) for part in parts if part.kind is PartKind.CALL)
    return ParsedAnswer(texts.get(PartKind.TEXT), texts.get(PartKind.REASONING), calls)
