"""What a parser says: events, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; its arguments follow as deltas that join to one JSON object. Indices count from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentDelta:
    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call's arguments are complete. whole=False: the model broke off or wrote nonsense, and the arguments were
    only closed.
    """

    index: int
    whole: bool = True


Event = ReasoningDelta | ContentDelta | CallStart | ArgumentDelta | CallEnd


@dataclass(frozen=True)
class ParsedCall:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """A whole answer. `content` and `reasoning` are None when there is none."""

    content: str | None
    reasoning: str | None
    calls: tuple[ParsedCall, ...]

    @property
    def finish_reason(self) -> str:
        """The finish reason of an answer that ended by itself."""
        return "tool_calls" if self.calls else "stop"


def collect(events: Iterable[Event]) -> ParsedAnswer:
    """Fold events into the message that a client of the stream has at the end."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: dict[int, CallStart] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case CallStart(index):
                starts[index] = event
                arguments[index] = []
            case ArgumentDelta(index, text):
                arguments[index].append(text)
    calls = tuple(ParsedCall(start.id, start.name, "".join(arguments[i])) for i, start in starts.items())
    return ParsedAnswer("".join(content) or None, "".join(reasoning) or None, calls)
