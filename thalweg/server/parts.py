"""One answer as its parts in order: thoughts, texts, tool calls. What the APIs that send typed parts (Anthropic's,
Responses) write down.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from thalweg.server.contract import Piece
from thalweg.text.events import ArgumentDelta, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta
from thalweg.text.parser import Parser


class Kind(enum.Enum):
    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, eq=False)
class Part:
    """index: its place in the answer. id, name: of a call, whose text is its arguments, JSON once it is closed."""

    kind: Kind
    index: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    part: Part


@dataclass(frozen=True, slots=True)
class Grew:
    part: Part
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    part: Part


Change = Opened | Grew | Closed


class Composer:
    """Composes the parts of one choice from its pieces; one part is open at a time. parser: fresh, for this choice
    alone.
    """

    def __init__(self, parser: Parser) -> None:
        self.parts: list[Part] = []
        self._parser = parser
        self._open: Part | None = None
        self._changes: list[Change] = []

    @property
    def called(self) -> bool:
        return any(part.kind is Kind.CALL for part in self.parts)

    def feed(self, piece: Piece) -> list[Change]:
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
            self._grow(self._current(Kind.TEXT), event.text)
        elif isinstance(event, ReasoningDelta):
            self._grow(self._current(Kind.THOUGHT), event.text)
        elif isinstance(event, CallStart):
            self._begin(Kind.CALL, event.id, event.name)
        elif isinstance(event, ArgumentDelta):
            self._grow(self._current(Kind.CALL), event.text)
        elif isinstance(event, CallEnd):
            self._close()

    def _current(self, kind: Kind) -> Part:
        if self._open is None or self._open.kind is not kind:
            assert kind is not Kind.CALL, "a call starts before its arguments come"
            return self._begin(kind)
        return self._open

    def _begin(self, kind: Kind, id: str = "", name: str = "") -> Part:
        self._close()
        part = self._open = Part(kind, len(self.parts), id, name)
        self.parts.append(part)
        self._changes.append(Opened(part))
        return part

    def _grow(self, part: Part, text: str) -> None:
        part.pieces.append(text)
        self._changes.append(Grew(part, text))

    def _close(self) -> None:
        if self._open is not None:
            self._changes.append(Closed(self._open))
            self._open = None
