"""Regular expressions that end a sequence, matched as its text comes.

The engine of llguidance is linear in the text and bounded in memory. Expressions that it does not have (look-around,
back references, word boundaries) are refused.
"""

from __future__ import annotations

from functools import cache, lru_cache

from llguidance import LLMatcher, LLTokenizer

from thalweg.core.errors import InvalidRequest
from thalweg.text.schema_grammar import LIMITS

FIELD = "stop_regex"


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")  # a token is a byte


@lru_cache(256)
def _compile(pattern: str) -> LLMatcher:
    """Raises InvalidRequest."""
    state = LLMatcher(_bytes(), LLMatcher.grammar_from_regex(f"(?s:.*)(?:{pattern})"), log_level=0, limits=LIMITS)
    if not state.is_error():
        if state.is_accepting():
            raise InvalidRequest(FIELD, f"{pattern!r} matches the empty text, so it would stop everything")
        return state
    error = state.get_error()
    reason = error.rpartition("\nerror: ")[2].partition("\n")[0]
    unsupported = "look" in error or "backreference" in error
    why = "look-around, anchors and back references are not supported" if unsupported else f"does not compile: {reason}"
    raise InvalidRequest(FIELD, f"{pattern!r}: {why}")


class RegexStops:
    """Finds the first place in one sequence's text at which a match of an expression ends. Raises InvalidRequest."""

    __slots__ = ("_states",)

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._states = [(pattern, _compile(pattern).deep_copy()) for pattern in patterns]

    def feed(self, text: str, may_stop: bool = True) -> tuple[int, str] | None:
        """(characters of `text` up to the end of the match, the expression). may_stop: a match in this text counts.

        Raises InvalidRequest if matching an expression goes beyond its limits.
        """
        for i, character in enumerate(text, 1):
            for pattern, state in self._states:
                if not state.consume_tokens(list(character.encode())):
                    raise InvalidRequest(FIELD, f"{pattern!r} is too complex to be matched in this text")
            if may_stop and (found := next((pattern for pattern, state in self._states if state.is_accepting()), None)):
                return i, found
        return None


def check(patterns: tuple[str, ...]) -> None:
    """Raises InvalidRequest for an expression that cannot be matched."""
    for pattern in patterns:
        _compile(pattern)
