"""Request bodies: bytes → checked structs. Whatever is wrong becomes an InvalidRequest that names the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from thalweg.core.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)
MAX_DEPTH = 128  # of objects and lists in each other: everything behind reads them by recursion
# What a body may hold at most, by the marks that it takes to write it: decoding happens between two tokens of every
# stream, and with these a body of any size is decoded in 0.4 s at most, where one of 32 MiB could take 2.
BOUNDS = ((b"[{", 1 << 20, "objects and lists"), (b'"', 1 << 21, "quotation marks"), (b",", 1 << 22, "commas"))
_STRING = re.compile(b'"[^"]*"')
_NOT_FRAME = bytes(set(range(256)) - set(b'"[]{}'))


def read(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decodes a JSON body. Raises InvalidRequest; `field` is "" when the body as a whole is wrong."""
    for marks, most, what in BOUNDS:
        if len(body) > most and sum(map(body.count, marks)) > most:
            raise InvalidRequest("", f"the body has more than {most} {what}: send less in one request")
    if _deep(body):
        raise InvalidRequest("", f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(body, str(error)) from None


def _deep(body: bytes) -> bool:
    """Whether brackets stand in more than MAX_DEPTH others. Each turn takes the innermost pairs away, so it ends after
    MAX_DEPTH of them.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    frame = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_FRAME).replace(b'""', b"")
    brackets = _STRING.sub(b"", frame).replace(b"{", b"[").replace(b"}", b"]")
    for _ in range(MAX_DEPTH):
        size, brackets = len(brackets), brackets.replace(b"[]", b"")
        if len(brackets) in (0, size):  # all are gone; or what is left has no partner, which the decoder will say
            return False
    return True


def convert(value: Any, kind: type[T], field: str) -> T:
    """A part of a body, found at `field`, as this struct. Raises InvalidRequest."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        inner = _invalid(str(error))
        raise InvalidRequest(f"{field}.{inner.field}".rstrip("."), inner.message) from None


def _invalid(text: str) -> InvalidRequest:
    """From "Expected `int`, got `str` - at `$.prompt[2]`" (or "… - at `key` in `$.logit_bias`") to field and
    message.
    """
    message, _, where = text.rpartition(" - at ")
    if not message:
        message, where = text, ""
    path = where.rpartition("`$")[2].strip("`").removeprefix(".").replace("[...]", "")
    if missing := _between(message, "missing required field `", "`"):
        return InvalidRequest(f"{path}.{missing}".removeprefix("."), "is required")
    return InvalidRequest(path, message[:1].lower() + message[1:])


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


def _malformed(body: bytes, why: str) -> InvalidRequest:
    """Python's clients write NaN and Infinity, and half surrogates, which are not JSON: name the field that holds
    one.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return InvalidRequest("", f"the body must be a JSON object: {why}")
    for field, message in _unspeakable(value, ""):
        return InvalidRequest(field, message)
    return InvalidRequest("", f"the body must be a JSON object: {why}")


def _unspeakable(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, got {value}"
    elif isinstance(value, str):
        if any("\ud800" <= c <= "\udfff" for c in value):
            yield path, "holds half a surrogate pair: not valid Unicode"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _unspeakable(item, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _unspeakable(item, f"{path}[{i}]")


@contextmanager
def named(**names: str) -> Iterator[None]:
    """Inside, an InvalidRequest about a field of the engine's names the field that the client wrote:
    named(max_tokens="max_new_tokens").
    """
    try:
        yield
    except InvalidRequest as error:
        if error.field in names:
            raise InvalidRequest(names[error.field], error.message) from None
        raise
