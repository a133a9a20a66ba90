"""Grammars: compiles the structure of an output to a matcher of the allowed tokens. The wrapper of llguidance.

Why llguidance: it has no dependencies (xgrammar brings transformers, Triton and torch), it bounds its work in states
and fuel, so a hostile schema ends with an error, and it refuses schema keywords that it does not support.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.text.json_schema import SchemaError, fragment
from thalweg.text.schema_grammar import LIMITS, EnforceableSchema, enforceable, styled
from thalweg.text.structural_tag import MAX_EXPRESSION, TagError, old_form, to_lark
from thalweg.text.tokenizer import Tokenizer

MAX_SOURCE = 1 << 18  # characters
MAX_DEPTH = 64  # of nested objects and arrays in a schema
MAX_REASON = 300
PARALLEL_FROM = 1 << 14  # token ids from which the masks of a batch are computed on several threads
_LONG_NUMBER = re.compile(r"[0-9]{18}|[0-9.]e[+]?[0-9]{2}", re.IGNORECASE)


class LoweredGrammar(NamedTuple):
    source: str  # in the library's form
    unenforced: tuple[str, ...] = ()  # see `Grammar`


def check(grammar: Grammar) -> tuple[str, ...]:
    """What the grammar does not enforce (see `Grammar`).

    Raises InvalidRequest naming the grammar's field if it does not compile within the limits.
    """
    if not grammar.is_set:
        return ()
    lowered = lower(grammar)
    failed, messages = LLMatcher.validate_grammar_with_warnings(lowered.source, limits=LIMITS)
    if failed:
        raise InvalidRequest(grammar.field, _reason(messages[0]))
    return lowered.unenforced


def lower(grammar: Grammar) -> LoweredGrammar:
    """The grammar in the library's form. Raises InvalidRequest if it is malformed or too large."""
    limit = MAX_EXPRESSION if grammar.kind in ("regex", "ebnf") else MAX_SOURCE
    if len(grammar.source) > limit:
        raise InvalidRequest(grammar.field, f"has {len(grammar.source)} characters; at most {limit} are compiled")
    if "\0" in grammar.source:
        raise InvalidRequest(grammar.field, "contains a NUL character")
    return _LOWER[grammar.kind](grammar)


def json_rule(schema: Any, any_whitespace: bool = True) -> str:
    """A schema of `read_schema`, or a part of one, as a term of a Lark grammar. any_whitespace: as in `Grammar`; models
    write arguments of calls with it.
    """
    whole = styled(schema, any_whitespace) if isinstance(schema, dict) else schema
    return "%json " + json.dumps(whole, ensure_ascii=False)


def read_schema(
    source: str, field: str, strict: bool = False, name: str = ""
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A JSON schema in the form that compiles, and what of it is not enforced (see `Grammar`).

    source: JSON of an object, or of true for any value. strict: refuse a schema that is not enforced in full. name: of
    the tool that it belongs to, for messages. Raises InvalidRequest naming the place in the schema.
    """
    schema = _json(source, field)
    if schema is not True and not isinstance(schema, dict):
        raise InvalidRequest(field, "must be a JSON schema, that is an object")
    if _is_too_deep(schema):
        raise InvalidRequest(field, f"is nested deeper than {MAX_DEPTH} levels")
    of_tool = f" (tool {name!r})" if name else ""
    try:
        read: EnforceableSchema = enforceable(source)
    except SchemaError as error:
        raise InvalidRequest(field, f"{fragment(error.path)}{of_tool} {error.message}") from None
    places = [f"{fragment(path)}{of_tool} {text}" for path, text in read.notes.items()]
    if strict and places:
        raise InvalidRequest(field, f"{places[0]}: leave it out, or leave strict out")
    return read.schema, tuple(field + place for place in places)


def _schema(grammar: Grammar) -> LoweredGrammar:
    schema, unenforced = read_schema(grammar.source, grammar.field, grammar.strict)
    return LoweredGrammar(_styled_source(schema, grammar.any_whitespace), unenforced)


def _styled_source(schema: dict[str, Any], any_whitespace: bool) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(styled(schema, any_whitespace)))


def _ebnf(grammar: Grammar) -> LoweredGrammar:
    if "%json" in grammar.source and _LONG_NUMBER.search(grammar.source):  # the library overflows its stack
        raise InvalidRequest(grammar.field, "has a number of more than 17 digits in a schema")
    try:
        return _lark(any_to_lark(grammar.source))
    except Exception as error:  # the library raises nothing more precise
        raise InvalidRequest(grammar.field, f"is not a grammar: {_reason(str(error))}") from error


def _lark(source: str) -> LoweredGrammar:
    return LoweredGrammar(LLMatcher.grammar_from_lark(source))


def _choice(grammar: Grammar) -> LoweredGrammar:
    texts = _json(grammar.source, grammar.field)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest(grammar.field, "must be a list of texts, of which none is empty")
    return _lark("start: CHOICE\nCHOICE: " + " | ".join(map(literal, texts)))


def _structural_tag(grammar: Grammar) -> LoweredGrammar:
    """Free text and structures in it: see `thalweg.text.structural_tag`."""
    tag = _json(grammar.source, grammar.field)
    unenforced: list[str] = []

    def schema_rule(schema: Any, where: str) -> str:
        read, notes = read_schema(json.dumps(schema), grammar.field + where, grammar.strict)
        unenforced.extend(notes)
        return json_rule(read)

    try:
        if not isinstance(tag, dict):
            raise TagError("", "must be an object")
        source = to_lark(tag["format"], schema_rule) if "format" in tag else old_form(tag, schema_rule)
    except TagError as error:
        raise InvalidRequest(grammar.field + error.path, error.message) from None
    return LoweredGrammar(_lark(source).source, tuple(unenforced))


_LOWER: dict[str, Callable[[Grammar], LoweredGrammar]] = {
    "json_object": lambda grammar: LoweredGrammar(_styled_source({"type": "object"}, grammar.any_whitespace)),
    "json_schema": _schema,
    "regex": lambda grammar: LoweredGrammar(LLMatcher.grammar_from_regex(grammar.source)),
    "ebnf": _ebnf,
    "choice": _choice,
    "structural_tag": _structural_tag,
    "lark": lambda grammar: LoweredGrammar(LLMatcher.grammar_from_lark(grammar.source), grammar.unenforced),
}


def literal(text: str) -> str:
    """A text as a term of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _json(source: str, field: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"is not JSON ({_reason(str(error))})") from None


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = [
            node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)
        ]
        level = [child for group in children for child in group]
        if not level:
            return False
    return True


def _reason(message: str) -> str:
    """What is wrong, from a message of the library, without its own grammar text and terms."""
    if "NoExtension" in message:
        return "no text matches it"
    if re.search("TooComplex|fuel|limit|too (big|large|many)|stack level", message):
        return "is too complex to be enforced"
    if syntax := re.search(r"([0-9]+)\([0-9]+\): lexer error", message):
        return f"has a syntax error in line {syntax[1]}"
    if "lookarounds" in message:
        return "look-around, word boundaries and anchors in the middle are not supported"
    if error := re.search(r"\nerror: (.*)", message):
        return error[1]
    first = re.sub(r"^(at )?[0-9]+\([0-9]+\): ", "", message).partition("\n")[0]
    return " ".join(first.split())[:MAX_REASON]


class _Vocabulary:
    """The library's view of a tokenizer. Added tokens are special: only marks in a grammar are made of them."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_ids: Sequence[int]) -> None:
        known = min(vocab, tokenizer.vocab_size)
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (vocab - known)
        self.special_token_ids = sorted({*tokenizer.added_ids, *eos_ids})
        self._encode = tokenizer.encode
        marks = (tokenizer.token_bytes(i).decode(errors="replace") for i in tokenizer.added_ids if i < known)
        added = sorted(marks, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, filter(None, added))) or r"(?!)")

    def __call__(self, text: str) -> list[int]:
        """Tokenizes a required text. One that contains a mark (an enum's value may) is cut there, so that the mark does
        not become its token.
        """
        ids: list[int] = []
        begin, found = 0, self._added.search(text)
        while found:
            ids += self._encode(text[begin : found.start() + 1], False)
            begin = found.start() + 1
            found = self._added.search(text, begin)
        return ids + self._encode(text[begin:], False)


class GrammarMatcher:
    """The state of one sequence in its grammar."""

    def __init__(self, state: LLMatcher) -> None:
        self.state = state

    def copy(self) -> Self:
        return type(self)(self.state.deep_copy())

    @property
    def error(self) -> str:
        """Why the sequence cannot continue, or ""."""
        return _reason(self.state.get_error())

    def accept(self, tokens: Sequence[int]) -> bool:
        """Takes the next tokens. False if the grammar forbids them; then the matcher cannot continue."""
        return bool(self.state.consume_tokens(list(tokens)))


class GrammarCompiler:
    """Compiles grammars for one tokenizer. vocab: width of the logits. eos_ids: at least one."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_ids: Sequence[int]) -> None:
        vocabulary: Any = _Vocabulary(tokenizer, vocab, eos_ids)
        self.tokenizer = LLTokenizer(vocabulary, eos_token=list(eos_ids), slices=LLTokenizer.json_slices())
        self.specials = tuple(vocabulary.special_token_ids)
        self._executor: LLExecutor | None = None

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the start, to be copied for each sequence. Raises InvalidRequest."""
        state = LLMatcher(self.tokenizer, lower(grammar).source, log_level=0, limits=LIMITS)
        if not state.is_error():
            state.compute_bitmask()  # builds what the first mask needs, off the engine's thread
        if state.is_error():
            raise InvalidRequest(grammar.field, _reason(state.get_error()))
        return GrammarMatcher(state)

    def fill(self, wanted: Sequence[tuple[GrammarMatcher, int]], bits: NDArray[np.int32]) -> None:
        """Writes the masks of these matchers into these rows of `bits` (see `GrammarMasks`)."""
        start, size = bits.ctypes.data, bits.shape[1] * 4
        if len(wanted) == 1 or size * 8 < PARALLEL_FROM:
            for matcher, row in wanted:
                matcher.state.unsafe_compute_mask_ptr(start + row * size, size)
            return
        self._executor = self._executor or LLExecutor()
        self._executor.unsafe_compute_mask_ptr(
            [(matcher.state, row) for matcher, row in wanted], start, size, len(bits)
        )
