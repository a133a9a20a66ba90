"""Cuts a stream of text into plain text and tags, wherever the stream itself was cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tag:
    kind: str  # `invoke`, `/invoke` …
    raw: str  # as written
    attributes: Mapping[str, str] = field(default_factory=dict)  # of DSML tags


Token = str | Tag


@dataclass(frozen=True)
class TagSyntax:
    """The tags of a format."""

    openers: tuple[str, ...]  # beginnings of tags, after `fold`; held back at the end of a piece of text
    # (text, position of an opener) → the tag and its end, or None while more text may belong to it
    read: Callable[[str, int], tuple[Tag, int] | None]
    fold: Mapping[int, int] = field(default_factory=dict)  # code points that count as others (ASCII bars)


def literal_tags(kinds: Mapping[str, str], fold: Mapping[int, int] | None = None) -> TagSyntax:
    """Tags that are fixed strings: text → kind."""
    table = dict(fold or {})

    def read(text: str, at: int) -> tuple[Tag, int] | None:
        mark = next(mark for mark in kinds if text.translate(table).startswith(mark, at))
        end = at + len(mark)
        return Tag(kinds[mark], text[at:end]), end

    return TagSyntax(tuple(kinds), read, table)


class Lexer:
    """Takes text, returns tokens. Adjacent text may come in several pieces, a tag comes whole."""

    def __init__(self, syntaxes: Sequence[TagSyntax]) -> None:
        self._reads = {opener: syntax.read for syntax in syntaxes for opener in syntax.openers}
        openers = sorted(self._reads, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, openers)) if openers else r"(?!)")
        self._heads = frozenset(opener[:n] for opener in openers for n in range(1, len(opener)))
        self._longest = max(map(len, openers), default=1) - 1
        self._fold = {a: b for syntax in syntaxes for a, b in syntax.fold.items()}
        self._buffer = ""

    def feed(self, text: str) -> list[Token]:
        text = self._buffer + text
        folded = text.translate(self._fold) if self._fold else text
        tokens: list[Token] = []
        at = 0
        while True:
            match = self._pattern.search(folded, at)
            end = match.start() if match else self._partial(folded, at)
            if end > at:
                tokens.append(text[at:end])
            read = self._reads[match.group()](text, end) if match else None
            if read is None:
                self._buffer = text[end:]
                return tokens
            tag, at = read
            tokens.append(tag)

    def finish(self) -> Token:
        """Text that was held back: text that only looked like a tag, or a tag that never ended (kind `partial`)."""
        held, self._buffer = self._buffer, ""
        return Tag("partial", held) if self._pattern.match(held.translate(self._fold)) else held

    def _partial(self, folded: str, at: int) -> int:
        """The beginning of the longest suffix that may become a tag; the text's length if there is none."""
        for i in range(max(at, len(folded) - self._longest), len(folded)):
            if folded[i:] in self._heads:
                return i
        return len(folded)
