"""Request parsing: bytes → checked structs → sampling parameters. Every error is an InvalidRequest that names the
field.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from thalweg.config.setting import nearest
from thalweg.core.errors import InvalidRequest
from thalweg.core.sampling import SamplingParams
from thalweg.server.protocol import ChatRequest, CompletionRequest, NativeSampling, SamplingFields
from thalweg.server.refused import RefusedFields

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)
DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's, with its names only
MAX_DEPTH = 128  # nested objects and lists: later code reads bodies recursively
# Limits of a body by the marks that it is written with. Decoding blocks the event loop: within these limits it takes
# 0.4 s at most; a 32 MiB body of brackets would take 2 s.
BOUNDS = ((b"[{", 1 << 20, "objects and lists"), (b'"', 1 << 21, "quotation marks"), (b",", 1 << 22, "commas"))
_STRING = re.compile(b'"[^"]*"')
_NOT_BRACKETS = bytes(set(range(256)) - set(b'"[]{}'))
_DEFAULTED = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
_WORDS = {"str": "a text", "int": "an integer", "float": "a number", "bool": "true or false", "array": "a list",
          "object": "an object"}  # fmt: skip
_decoder = functools.cache(msgspec.json.Decoder)


def parse_body(body: bytes, kind: type[StructT]) -> StructT:
    """Decodes a JSON body. Raises InvalidRequest; its field is "" when the body as a whole is wrong."""
    for marks, limit, name in BOUNDS:
        if len(body) > limit and sum(map(body.count, marks)) > limit:
            raise InvalidRequest("", f"the body has more than {limit} {name}: send less in one request")
    if _is_too_deep(body):
        raise InvalidRequest("", f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        value: StructT = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _key_error(body, str(error)) or _field_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _json_error(body, str(error)) from None
    if isinstance(value, RefusedFields):
        value.refuse()
    return value


def _is_too_deep(body: bytes) -> bool:
    """Whether brackets are nested deeper than MAX_DEPTH. Each round removes the innermost pairs."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    frame = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_BRACKETS).replace(b'""', b"")
    brackets = _STRING.sub(b"", frame).replace(b"{", b"[").replace(b"}", b"]")
    for _ in range(MAX_DEPTH):
        size, brackets = len(brackets), brackets.replace(b"[]", b"")
        if len(brackets) in (0, size):  # nothing left, or unbalanced brackets, which the decoder reports
            return False
    return True


def parse_query(query: Mapping[str, str], kind: type[StructT]) -> StructT:
    """Reads a query string. Raises InvalidRequest."""
    try:
        return msgspec.convert(dict(query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None


def convert(value: Any, kind: type[StructT], field: str) -> StructT:
    """Converts a part of a body, found at `field`. Raises InvalidRequest."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        inner = _field_error(str(error))
        raise InvalidRequest(f"{field}.{inner.field}".rstrip("."), inner.message) from None


def _field_error(text: str) -> InvalidRequest:
    """Splits msgspec's "Expected `int`, got `str` - at `$.prompt[2]`" (or "… - at `key` in `$.logit_bias`")."""
    message, _, where = text.rpartition(" - at ")
    if not message:
        message, where = text, ""
    path = where.rpartition("`$")[2].strip("`").removeprefix(".").replace("[...]", "")
    if missing := message.partition("missing required field `")[2].partition("`")[0]:
        return InvalidRequest(f"{path}.{missing}".removeprefix("."), "is required")
    if unknown := message.partition("contains unknown field `")[2].partition("`")[0]:
        guess = nearest(unknown, NativeSampling.__struct_fields__)  # the one struct that has to know all its fields
        instead = f"did you mean {guess}?" if guess else "the names are SGLang's"
        return InvalidRequest(f"{path}.{unknown}".removeprefix("."), f"is not known; {instead}")
    if types := re.fullmatch("Expected `(.*)`, got `(.*)`", message):
        wanted, got = ([_WORDS.get(name, name) for name in each.split(" | ")] for each in types.groups())
        wanted = [name for name in wanted if name != "null"] or wanted
        return InvalidRequest(path, f"must be {' or '.join(dict.fromkeys(wanted))}, got {' or '.join(got)}")
    return InvalidRequest(path, message[:1].lower() + message[1:])


def _key_error(body: bytes, text: str) -> InvalidRequest | None:
    """Names the keys of an object of token ids that are none; msgspec names only the object."""
    path = text.rpartition(" - at `key` in `$.")[2].rstrip("`") if " - at `key` in `$." in text else ""
    value = json.loads(body) if path else None
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, dict):
        return None
    keys = ", ".join(repr(key) for key in value if not re.fullmatch("-?[0-9]+", key))
    return InvalidRequest(path, f"keys must be token ids, got {keys}")


def _json_error(body: bytes, reason: str) -> InvalidRequest:
    """Python clients write NaN, Infinity and lone surrogates, which are not JSON: names the field that holds one."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    for field, message in _not_json(value, ""):
        return InvalidRequest(field, message)
    return InvalidRequest("", f"the body must be a JSON object: {reason}")


def _not_json(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, got {value}"
    elif isinstance(value, str):
        if any("\ud800" <= c <= "\udfff" for c in value):
            yield path, "contains a lone surrogate: not valid Unicode"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _not_json(item, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _not_json(item, f"{path}[{i}]")


@contextmanager
def renamed(rename: Callable[[str], str]) -> Iterator[None]:
    """Inside, an InvalidRequest about one of the engine's fields names the field of the client's request instead."""
    try:
        yield
    except InvalidRequest as error:
        raise error.at(rename(error.field)) from None


def given(value: T | None, default: T) -> T:
    return default if value is None else value


def listed_ids(body: CompletionRequest | ChatRequest) -> tuple[int, ...]:
    """Of `logprob_token_ids`. Raises InvalidRequest unless log-probabilities are asked for."""
    # in completions it is a number, and 0 is on
    is_off = not body.logprobs if isinstance(body, ChatRequest) else body.logprobs is None
    if body.logprob_token_ids and is_off:
        raise InvalidRequest("logprob_token_ids", "needs logprobs")
    return tuple(body.logprob_token_ids or ())


def sampling_params(body: SamplingFields, default: SamplingParams, **own: Any) -> SamplingParams:
    """The parameters that all OpenAI routes and /generate share. own: those that they spell differently.

    The engine checks the ranges.
    """
    values: dict[str, Any] = {name: given(getattr(body, name), getattr(default, name)) for name in _DEFAULTED}
    values |= {"seed": body.seed, "skip_special_tokens": body.skip_special_tokens is not False, **own}
    return SamplingParams(
        logit_bias=tuple((body.logit_bias or {}).items()),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_regex=(body.stop_regex,) if isinstance(body.stop_regex, str) else tuple(body.stop_regex or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        n=given(body.n, 1),
        **values,
    )


def native_params(sampling: NativeSampling, default: SamplingParams, **own: Any) -> SamplingParams:
    """The parameters under SGLang's names. own: those that it does not have among them."""
    return sampling_params(
        sampling,
        default,
        seed=given(sampling.sampling_seed, sampling.seed),
        max_tokens=given(sampling.max_new_tokens, DEFAULT_MAX_NEW_TOKENS),
        min_tokens=given(sampling.min_new_tokens, 0),
        include_stop_str_in_output=bool(sampling.no_stop_trim),
        **own,
    )
