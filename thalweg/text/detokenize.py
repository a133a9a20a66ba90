"""Token ids → text as they come, one detokenizer per sequence, without partial characters; and stop strings."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class ByteDetokenizer:
    """For byte-level BPE: text is an incremental UTF-8 decoding; at most three bytes are held.

    pieces: id → bytes. Other ids (hidden special tokens, padding of the vocabulary) have no text.
    """

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def feed(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._decode(b"".join([pieces[i] for i in ids if i in pieces]))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For other tokenizers (SentencePiece): decodes a short window of ids twice and returns the difference.

    The window is what was returned last, for decoders that look at neighbours (a leading space), and what came since:
    a call costs O(new ids). Up to four ids that make no whole character yet are held.
    """

    __slots__ = ("_decode", "_hidden", "_ids", "_returned", "_vocab_size")

    _LONGEST = 4  # ids of one character: bytes in UTF-8

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int], vocab_size: int) -> None:
        self._decode, self._hidden, self._vocab_size = decode, hidden, vocab_size
        self._ids: list[int] = []
        self._returned = 0  # of `_ids`

    def feed(self, ids: Sequence[int]) -> str:
        self._ids += [i for i in ids if i not in self._hidden and 0 <= i < self._vocab_size]
        for end in range(len(self._ids), max(len(self._ids) - self._LONGEST, self._returned), -1):
            text = self._decode(self._ids[:end])
            if not text.endswith("\ufffd"):
                return self._advance(text, end)
        return self.finish() if len(self._ids) - self._returned >= self._LONGEST else ""

    def finish(self) -> str:
        return self._advance(self._decode(self._ids), len(self._ids))

    def _advance(self, text: str, end: int) -> str:
        new = text[len(self._decode(self._ids[: self._returned])) :]
        self._ids = self._ids[self._returned :]
        self._returned = end - self._returned
        return new


# The texts of all `feed`s and of `finish` join to the whole decoded text.
Detokenizer = ByteDetokenizer | WindowDetokenizer


_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# GPT-2's alphabet: the character of each byte
BYTE_CHARACTERS = [chr(byte if byte in _PRINTABLE else 0x100 + _OTHERS.index(byte)) for byte in range(256)]


def byte_pieces(tokens: Mapping[int, str], added: Mapping[int, str]) -> dict[int, bytes]:
    """id → bytes of a byte-level BPE vocabulary.

    A token spells bytes in GPT-2's alphabet, where printable Latin-1 is itself and the other bytes are U+0100 and on.
    One with any other character (an added token) is its own UTF-8.
    """
    alphabet = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}

    def spell(token: str) -> bytes:
        try:
            return bytes([alphabet[c] for c in token])
        except KeyError:
            return token.encode()

    return {i: spell(added.get(i, token)) for i, token in tokens.items()}


class StopCut(NamedTuple):
    text: str  # can be shown now
    stop: str | None = None  # the stop string that ended the sequence


class StopMatcher:
    """Cuts one sequence at the stop string that is complete first, the longest of those. Holds back only text that may
    become a stop string.
    """

    __slots__ = ("_held", "_include_stop", "_longest", "_starts", "_stops")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=1)
        self._starts = re.compile("|".join(re.escape(stop[0]) for stop in self._stops) or r"(?!)")
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str, may_stop: bool = True) -> StopCut:
        """After a cut with a stop the matcher is done. may_stop: a stop string that ends in this text counts."""
        begun, text = len(self._held), self._held + text
        found = [(text.find(stop, max(begun - len(stop) + 1, 0)), stop) for stop in self._stops]
        ends = [(at + len(stop), -len(stop), stop) for at, stop in found if at >= 0]
        if ends and may_stop:
            end, size, stop = min(ends)
            self._held = ""
            return StopCut(text[: end if self._include_stop else end + size], stop)
        starts = (match.start() for match in self._starts.finditer(text, max(len(text) - self._longest + 1, 0)))
        shown = next((at for at in starts if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))
        self._held = text[shown:]
        return StopCut(text[:shown])

    def finish(self) -> str:
        """The held text, if no stop string came."""
        held, self._held = self._held, ""
        return held
