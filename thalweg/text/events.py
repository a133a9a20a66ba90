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
    complete: bool = True  # False: the call was malformed or broken off; its arguments are as far as they came
    deltas: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Arguments of a call, one JSON object if it is complete."""
        return "".join(self.deltas)


class Event(NamedTuple):
    type: Literal["open", "delta", "close"]
    part: Part
    text: str = ""  # of a delta


class ParsedCall(NamedTuple):
    id: str
    name: str
    arguments: str
    complete: bool = True  # False: see `Part`


class ParsedAnswer(NamedTuple):
    content: str | None
    reasoning: str | None
    calls: tuple[ParsedCall, ...]

    @property
    def has_calls(self) -> bool:
        """Whether there is a call that can be run."""
        return any(call.complete for call in self.calls)


def answer_of(parts: Sequence[Part]) -> ParsedAnswer:
    texts: dict[PartKind, str] = {}
    for part in parts:
        texts[part.kind] = texts.get(part.kind, "") + part.text
    calls = (part for part in parts if part.kind is PartKind.CALL)
    parsed = tuple(ParsedCall(part.id, part.name, part.text, part.complete) for part in calls)
    return ParsedAnswer(texts.get(PartKind.TEXT), texts.get(PartKind.REASONING), parsed)
