"""Token ids → text as they come, one detokenizer per sequence, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """`feed` returns the text that the new ids complete; `finish` whatever is still held. The pieces join to the whole
    decode.
    """

    def feed(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class ByteDetokenizer:
    """For byte-level BPE: an id is a string of bytes, so text is an incremental UTF-8 decoding; at most three bytes are
    held.

    pieces: id → bytes; ids that are not there (special tokens that are hidden, padding of the vocabulary) are nothing.
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
    """For any other tokenizer (SentencePiece): decodes a short window of ids twice and gives the difference.

    decode: ids → text. The window is the piece given last, for decoders that look at a token's neighbours (a leading
    space), and what came since: a call costs O(new ids). Ids at the end that make no whole character yet are held, four
    at most.
    """

    __slots__ = ("_decode", "_given", "_hidden", "_ids", "_vocab_size")

    _LONGEST = 4  # ids of one character: bytes in UTF-8

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int], vocab_size: int) -> None:
        self._decode = decode
        self._hidden = hidden
        self._vocab_size = vocab_size
        self._ids: list[int] = []
        self._given = 0

    def feed(self, ids: Sequence[int]) -> str:
        self._ids += [i for i in ids if i not in self._hidden and 0 <= i < self._vocab_size]
        for end in range(len(self._ids), max(len(self._ids) - self._LONGEST, self._given), -1):
            text = self._decode(self._ids[:end])
            if not text.endswith("\ufffd"):
                return self._give(text, end)
        return self.finish() if len(self._ids) - self._given >= self._LONGEST else ""

    def finish(self) -> str:
        return self._give(self._decode(self._ids), len(self._ids))

    def _give(self, text: str, end: int) -> str:
        new = text[len(self._decode(self._ids[: self._given])) :]
        self._ids = self._ids[self._given :]
        self._given = end - self._given
        return new


def byte_pieces(tokens: Mapping[int, str], added: Mapping[int, str]) -> dict[int, bytes]:
    """id → bytes of a byte-level BPE vocabulary: the decoder's own rule.

    A token spells bytes in GPT-2's alphabet; one with any character outside that alphabet (an added token) is its own
    UTF-8.
    """
    alphabet = byte_alphabet()
    return {i: _piece(added.get(i, token), alphabet) for i, token in tokens.items()}


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: character → byte. Printable Latin-1 stands for itself, the other bytes are U+0100 and on, in
    order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def _piece(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[c] for c in token])
    except KeyError:
        return token.encode()
