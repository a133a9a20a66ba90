"""One answer as its parts in order: reasoning, texts, tool calls. For the APIs with typed parts."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from thalweg.engine.streams import Piece
from thalweg.text.events import ArgumentDelta, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta
from thalweg.text.parser import AnswerParser


class PartKind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, eq=False)
class ContentPart:
    kind: PartKind
    index: int  # in the answer
    id: str = ""  # of a call, as name
    name: str = ""
    deltas: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of a call: its arguments, JSON once it is closed."""
        return "".join(self.deltas)


class PartEvent(NamedTuple):
    type: Literal["open", "delta", "close"]
    part: ContentPart
    text: str = ""  # of a delta


class PartBuilder:
    """Builds the parts of one answer from its pieces; one part is open at a time. parser: of this answer alone."""

    def __init__(self, parser: AnswerParser) -> None:
        self.parts: list[ContentPart] = []
        self._parser = parser
        self._open: ContentPart | None = None
        self._events: list[PartEvent] = []

    def text(self, kind: PartKind) -> str:
        """The text of all parts of a kind."""
        return "".join(part.text for part in self.parts if part.kind is kind)

    @property
    def calls(self) -> list[ContentPart]:
        return [part for part in self.parts if part.kind is PartKind.CALL]

    def feed(self, piece: Piece) -> list[PartEvent]:
        """The last piece closes the open part."""
        for event in self._parser.feed(piece.text):
            self._take(event)
        if piece.finish is not None:
            for event in self._parser.finish():
                self._take(event)
            self._close()
        events, self._events = self._events, []
        return events

    def _take(self, event: Event) -> None:
        match event:
            case ContentDelta():
                self._extend(PartKind.TEXT, event.text)
            case ReasoningDelta():
                self._extend(PartKind.REASONING, event.text)
            case CallStart():
                self._begin(PartKind.CALL, event.id, event.name)
            case ArgumentDelta():
                self._extend(PartKind.CALL, event.text)
            case CallEnd():
                self._close()

    def _begin(self, kind: PartKind, id: str = "", name: str = "") -> ContentPart:
        self._close()
        part = self._open = ContentPart(kind, len(self.parts), id, name)
        self.parts.append(part)
        self._events.append(PartEvent("open", part))
        return part

    def _extend(self, kind: PartKind, text: str) -> None:
        part = self._open
        if part is None or part.kind is not kind:
            assert kind is not PartKind.CALL, "a call starts before its arguments come"
            part = self._begin(kind)
        part.deltas.append(text)
        self._events.append(PartEvent("delta", part, text))

    def _close(self) -> None:
        if self._open is not None:
            self._events.append(PartEvent("close", self._open))
            self._open = None
