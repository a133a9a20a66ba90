"""One answer as its parts in order: thoughts, texts, tool calls. What the APIs that send typed parts (Anthropic's,
Responses) write down.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from thalweg.engine.streams import Piece
from thalweg.text.events import ArgumentDelta, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta
from thalweg.text.parser import AnswerParser


class PartKind(enum.Enum):
    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, eq=False)
class ContentPart:
    """index: its place in the answer. id, name: of a call, whose text is its arguments, JSON once it is closed."""

    kind: PartKind
    index: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class PartOpened:
    part: ContentPart


@dataclass(frozen=True, slots=True)
class PartDelta:
    part: ContentPart
    text: str


@dataclass(frozen=True, slots=True)
class PartClosed:
    part: ContentPart


PartEvent = PartOpened | PartDelta | PartClosed


class PartBuilder:
    """Composes the parts of one choice from its pieces; one part is open at a time. parser: fresh, for this choice
    alone.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self.parts: list[ContentPart] = []
        self._parser = parser
        self._open: ContentPart | None = None
        self._changes: list[PartEvent] = []

    @property
    def called(self) -> bool:
        return any(part.kind is PartKind.CALL for part in self.parts)

    def feed(self, piece: Piece) -> list[PartEvent]:
        """What a piece changes. The last piece closes what is open."""
        for event in self._parser.feed(piece.text):
            self._take(event)
        if piece.finish is not None:
            for event in self._parser.finish():
                self._take(event)
            self._close()
        changes, self._changes = self._changes, []
        return changes

    def _take(self, event: Event) -> None:
        if isinstance(event, ContentDelta):
            self._grow(self._current(PartKind.TEXT), event.text)
        elif isinstance(event, ReasoningDelta):
            self._grow(self._current(PartKind.THOUGHT), event.text)
        elif isinstance(event, CallStart):
            self._begin(PartKind.CALL, event.id, event.name)
        elif isinstance(event, ArgumentDelta):
            self._grow(self._current(PartKind.CALL), event.text)
        elif isinstance(event, CallEnd):
            self._close()

    def _current(self, kind: PartKind) -> ContentPart:
        if self._open is None or self._open.kind is not kind:
            assert kind is not PartKind.CALL, "a call starts before its arguments come"
            return self._begin(kind)
        return self._open

    def _begin(self, kind: PartKind, id: str = "", name: str = "") -> ContentPart:
        self._close()
        part = self._open = ContentPart(kind, len(self.parts), id, name)
        self.parts.append(part)
        self._changes.append(PartOpened(part))
        return part

    def _grow(self, part: ContentPart, text: str) -> None:
        part.pieces.append(text)
        self._changes.append(PartDelta(part, text))

    def _close(self) -> None:
        if self._open is not None:
            self._changes.append(PartClosed(self._open))
            self._open = None
