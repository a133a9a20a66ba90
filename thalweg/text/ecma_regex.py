"""Translates the patterns of JSON schemas, which are ECMA-262 expressions, to the syntax of Rust's regex crate."""

from __future__ import annotations

import re

_SPACE = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_$][\w$]*>)?(?!\?)")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})")
_LOW = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]+\}")
_MAX_CODE = 0x10FFFF


class UnsupportedPattern(ValueError):
    """The expression uses what no finite automaton matches, or is malformed. The message says which."""


def to_rust(pattern: str) -> str:
    """The expression that matches the same texts. Groups capture nothing. Raises UnsupportedPattern."""
    out: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "[":
            part, at = _class(pattern, at + 1)
        elif char == "\\":
            part, at = _escape(pattern, at + 1, in_class=False)
        elif char == "(":
            group = _GROUP.match(pattern, at)
            if group is None:
                raise UnsupportedPattern("look-around and inline flags are not supported")
            part, at = "(?:", group.end()
        elif quantifier := _QUANTIFIER.match(pattern, at):
            part, at = quantifier[0], quantifier.end()
            if pattern[at : at + 1] == "?":  # lazy: the same texts match
                at += 1
        elif char in ".^$|)":
            part, at = (_ANY if char == "." else char), at + 1
        else:
            part, at = _literal(ord(char)), at + 1
        out.append(part)
    return "".join(out)


def _literal(code: int, in_class: bool = False) -> str:
    if code > _MAX_CODE or 0xD800 <= code < 0xE000:
        raise UnsupportedPattern("a surrogate is not a character")
    if not in_class and (code < 32 and code not in (8, 9, 10, 12, 13) or code == 127):
        raise UnsupportedPattern("a control character is not supported")  # texts have no \\u
    char = chr(code)
    return char if char.isalnum() or code > 0x7F and char.isprintable() else f"\\x{{{code:x}}}"


def _escape(pattern: str, at: int, in_class: bool) -> tuple[str, int]:
    """The escape whose backslash is before `at`, and where it ends."""
    char = pattern[at : at + 1]
    if char in "dDwW" and char:
        return f"\\{char}", at + 1
    if char in "sS" and char:
        return (_SPACE if in_class and char == "s" else f"[{'^' if char == 'S' else ''}{_SPACE}]"), at + 1
    if found := _PROPERTY.match(pattern, at):
        return f"\\{found[0]}", found.end()
    code, end = _code(pattern, at, in_class)
    return _literal(code, in_class), end


def _code(pattern: str, at: int, in_class: bool) -> tuple[int, int]:
    """The code point of an escape of one character, and where it ends."""
    char = pattern[at : at + 1]
    if char == "b" and in_class:
        return 8, at + 1
    if char in _CONTROLS and not (char == "0" and pattern[at + 1 : at + 2].isdigit()):
        return _CONTROLS[char], at + 1
    if char == "c" and re.match("[A-Za-z]", pattern[at + 1 :]):
        return ord(pattern[at + 1]) % 32, at + 2
    if found := _HEX.match(pattern, at):
        code = int(found[1] or found[2] or found[3], 16)
        low = _LOW.match(pattern, found.end()) if 0xD800 <= code < 0xDC00 else None
        if low:
            return 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00, low.end()
        return code, found.end()
    if not char:
        raise UnsupportedPattern("ends with a backslash")
    if char.isalnum():
        kind = (
            "a word boundary" if char in "bB" else "a back-reference" if char.isdigit() or char == "k" else "the escape"
        )
        raise UnsupportedPattern(f"{kind} \\{char} is not supported")
    return ord(char), at + 1


def _class(pattern: str, at: int) -> tuple[str, int]:
    """The character class whose bracket is before `at`, and where it ends."""
    negated = pattern.startswith("^", at)
    at += negated
    items: list[str] = []
    while True:
        if at >= len(pattern):
            raise UnsupportedPattern("a character class is not closed")
        if pattern[at] == "]":
            break
        first, at = _class_atom(pattern, at)
        if pattern.startswith("-", at) and pattern[at + 1 : at + 2] not in ("", "]") and isinstance(first, int):
            last, end = _class_atom(pattern, at + 1)
            if isinstance(last, int):
                if last < first:
                    raise UnsupportedPattern("a range of characters is out of order")
                items.append(f"\\x{{{first:x}}}-\\x{{{last:x}}}")
                at = end
                continue
        is_alone = not items and pattern.startswith("]", at)
        items.append(_literal(first, not is_alone) if isinstance(first, int) else first)
    if not items:
        return ("(?s:.)" if negated else r"[^\x{0}-\x{10ffff}]"), at + 1
    return f"[{'^' if negated else ''}{''.join(items)}]", at + 1


def _class_atom(pattern: str, at: int) -> tuple[int | str, int]:
    """A character's code point, or a class within the class."""
    if pattern[at] != "\\":
        return ord(pattern[at]), at + 1
    if pattern[at + 1 : at + 2] in tuple("dDwWsSpP"):
        return _escape(pattern, at + 1, in_class=True)
    return _code(pattern, at + 1, in_class=True)
