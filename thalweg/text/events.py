"""The events of a parser, and the answer that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins. Its arguments follow as deltas that join to one JSON object."""

    index: int  # from 0
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentDelta:
    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    index: int
    whole: bool = True  # False: the call was malformed or broken off, and its arguments were only closed


Event = ReasoningDelta | ContentDelta | CallStart | ArgumentDelta | CallEnd


class ParsedCall(NamedTuple):
    id: str
    name: str
    arguments: str


class ParsedAnswer(NamedTuple):
    content: str | None
    reasoning: str | None
    calls: tuple[ParsedCall, ...]

    @property
    def finish_reason(self) -> str:
        """Of an answer that ended by itself."""
        return "tool_calls" if self.calls else "stop"


def collect(events: Iterable[Event]) -> ParsedAnswer:
    """The whole answer."""
    events = list(events)
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ArgumentDelta):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    starts = [event for event in events if isinstance(event, CallStart)]
    calls = tuple(ParsedCall(start.id, start.name, arguments.get(start.index, "")) for start in starts)
    return ParsedAnswer(content or None, reasoning or None, calls)
