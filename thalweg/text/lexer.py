"""Cuts a stream of text into plain text and tags, wherever the stream itself was cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tag:
    """One piece of markup. kind: `invoke`, `/invoke` …; raw: as it stood in the text; attributes: of DSML tags."""

    kind: str
    raw: str
    attributes: Mapping[str, str] = field(default_factory=dict)


Token = str | Tag
Read = Callable[[str, int], tuple[Tag, int] | None]


@dataclass(frozen=True)
class TagSyntax:
    """What a format's tags look like.

    openers: what every tag begins with (or is), after `fold`; their beginnings are held back at the end of a piece of
    text. read: (text, position of an opener) → the tag and where it ends, or None while it may go on in text still to
    come. fold: characters that count as another (ASCII bars for full-width ones), code point → code point.
    """

    openers: tuple[str, ...]
    read: Read
    fold: Mapping[int, int] = field(default_factory=dict)


NO_MARKS = TagSyntax((), lambda text, at: None)


def literal_marks(kinds: Mapping[str, str], fold: Mapping[int, int] | None = None) -> TagSyntax:
    """Marks of which each is one fixed string: text → kind."""
    table = dict(fold or {})

    def read(text: str, at: int) -> tuple[Tag, int] | None:
        mark = next(mark for mark in kinds if text.translate(table).startswith(mark, at))
        end = at + len(mark)
        return Tag(kinds[mark], text[at:end]), end

    return TagSyntax(tuple(kinds), read, table)


class Lexer:
    """`feed` text, get tokens; adjacent text may come in any number of pieces, tags come whole."""

    __slots__ = ("_buffer", "_fold", "_heads", "_longest", "_pattern", "_reads")

    def __init__(self, marks: Sequence[TagSyntax]) -> None:
        self._reads = {opener: mark.read for mark in marks for opener in mark.openers}
        openers = sorted(self._reads, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, openers)) if openers else r"(?!)")
        self._heads = frozenset(opener[:n] for opener in openers for n in range(1, len(opener)))
        self._longest = max(map(len, openers), default=1) - 1
        self._fold = {a: b for mark in marks for a, b in mark.fold.items()}
        self._buffer = ""

    def feed(self, text: str) -> list[Token]:
        text = self._buffer + text
        folded = text.translate(self._fold) if self._fold else text
        tokens: list[Token] = []
        at = 0
        while True:
            found = self._pattern.search(folded, at)
            end = found.start() if found else self._partial(folded, at)
            if end > at:
                tokens.append(text[at:end])
            read = self._reads[found.group()](text, end) if found else None
            if read is None:
                self._buffer = text[end:]
                return tokens
            tag, at = read
            tokens.append(tag)

    def finish(self) -> Token:
        """What was held back, if anything: text that only looked like a tag, or a tag that never ended (kind
        `partial`).
        """
        held, self._buffer = self._buffer, ""
        return Tag("partial", held) if self._pattern.match(held.translate(self._fold)) else held

    def _partial(self, folded: str, at: int) -> int:
        """Where the longest suffix begins that may become a tag; the length of the text when there is none."""
        for i in range(max(at, len(folded) - self._longest), len(folded)):
            if folded[i:] in self._heads:
                return i
        return len(folded)
