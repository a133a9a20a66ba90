"""Stop strings: cuts a stream of text at the first one, holding back no more than what could still become one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """The text that may be shown now, and the stop string that ended it (None: go on)."""

    text: str
    stop: str | None = None


class StopMatcher:
    """One per sequence. "First" is the stop string that is complete first, the longest of those: so no split of the
    text matters.

    A Knuth–Morris–Pratt state per stop string makes a call O(new characters), whatever the strings are.
    """

    __slots__ = ("_borders", "_held", "_include_stop", "_matched", "_starts", "_stops")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._starts = re.compile("|".join(re.escape(stop[0]) for stop in self._stops) if self._stops else r"(?!)")
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str) -> Cut:
        """What of the new text (and of what was held) may be shown. After a cut with a stop the matcher is done."""
        if not self._held and self._starts.search(text) is None:
            return Cut(text)
        seen = self._held + text
        for at in range(len(self._held), len(seen)):
            if self._step(seen[at]):
                stop = max((s for s, n in zip(self._stops, self._matched, strict=True) if n == len(s)), key=len)
                self._held = ""
                self._matched = [0] * len(self._stops)
                return Cut(seen[: at + 1 - (0 if self._include_stop else len(stop))], stop)
        shown = len(seen) - max(self._matched)
        self._held = seen[shown:]
        return Cut(seen[:shown])

    def finish(self) -> str:
        """The held text: no stop string came."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, char: str) -> bool:
        """Advance every stop string by one character; whether one is complete."""
        found = False
        for i, stop in enumerate(self._stops):
            n = self._matched[i]
            while n and stop[n] != char:
                n = self._borders[i][n - 1]
            n += stop[n] == char
            self._matched[i] = n
            found = found or n == len(stop)
        return found


def _borders(text: str) -> list[int]:
    """For each prefix the length of the longest proper prefix of it that is also its suffix."""
    borders = [0] * len(text)
    n = 0
    for i in range(1, len(text)):
        while n and text[i] != text[n]:
            n = borders[n - 1]
        n += text[i] == text[n]
        borders[i] = n
    return borders
