"""Grammars: compiles the structure of an output to a matcher of the allowed tokens. The wrapper of llguidance.

Why llguidance: it has no dependencies (xgrammar brings transformers, Triton and torch), it bounds its work in states
and fuel, so a hostile schema ends with an error, and it refuses schema keywords that it does not support.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.text.tokenizer import Tokenizer

MAX_SOURCE = 1 << 18  # characters
MAX_EXPRESSION = 1 << 14  # of a regex or EBNF, whose meaning grows faster than its text
MAX_DEPTH = 64  # of nested objects and arrays in a schema
MAX_REASON = 300
PARALLEL_FROM = 1 << 14  # token ids from which the masks of a batch are computed on several threads
# With these limits, by the library's figures, compiling takes at most some 100 ms, a mask some 10 ms.
LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=15_000,
    verbose_errors=False,
)
# Between the parts of a JSON text: nothing, a space, or a new line with its indentation. Without this limit models may
# write space forever.
JSON_STYLE = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,24})", "lenient": False}


def check(grammar: Grammar) -> None:
    """Raises InvalidRequest naming the grammar's field if it does not compile within the limits."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(lower(grammar), limits=LIMITS)
    if failed:
        raise InvalidRequest(grammar.field, _reason(messages[0]))


def lower(grammar: Grammar) -> str:
    """The grammar in the library's form. Raises InvalidRequest if it is malformed or too large."""
    limit = MAX_EXPRESSION if grammar.kind in ("regex", "ebnf") else MAX_SOURCE
    if len(grammar.source) > limit:
        raise InvalidRequest(grammar.field, f"has {len(grammar.source)} characters; at most {limit} are compiled")
    if "\0" in grammar.source:
        raise InvalidRequest(grammar.field, "contains a NUL character")
    return _LOWER[grammar.kind](grammar)


def json_rule(schema: Any) -> str:
    """A JSON schema as a term of a Lark grammar."""
    return "%json " + json.dumps(_styled(schema), ensure_ascii=False)


def _styled(schema: Any) -> Any:
    return {**schema, "x-guidance": JSON_STYLE} if isinstance(schema, dict) else schema


def _schema(grammar: Grammar) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_styled(read_schema(grammar.source, grammar.field))))


def _ebnf(grammar: Grammar) -> str:
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(grammar.source))
    except Exception as error:  # the library raises nothing more precise
        raise InvalidRequest(grammar.field, f"is not a grammar: {_reason(str(error))}") from error


def _choice(grammar: Grammar) -> str:
    texts = _json(grammar.source, grammar.field)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest(grammar.field, "must be a list of texts, of which none is empty")
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(literal, texts)))


def _structural_tag(grammar: Grammar) -> str:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [text]}: free text, and structures after triggers."""
    tags = _json(grammar.source, grammar.field)
    structures, triggers = (tags.get("structures"), tags.get("triggers")) if isinstance(tags, dict) else (None, None)
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise InvalidRequest(grammar.field, "must have structures and triggers, neither of them empty")
    parsed = []
    for i, structure in enumerate(structures):
        where = f"{grammar.field}.structures[{i}]"
        if not isinstance(structure, dict) or not all(isinstance(structure.get(key), str) for key in ("begin", "end")):
            raise InvalidRequest(where, "must be an object with begin, schema and end")
        begin, schema = structure["begin"], structure.get("schema", structure.get("parameters", {}))
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            raise InvalidRequest(f"{where}.begin", "does not begin with any of the triggers")
        styled = _styled(read_schema(json.dumps(schema), f"{where}.schema"))
        parsed.append(StructTag(trigger=trigger, begin=begin, grammar=styled, end=structure["end"]))
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(parsed, assume_special=False))


_LOWER: dict[str, Callable[[Grammar], str]] = {
    "json_object": lambda grammar: LLMatcher.grammar_from_json_schema(json.dumps(_styled({"type": "object"}))),
    "json_schema": _schema,
    "regex": lambda grammar: LLMatcher.grammar_from_regex(grammar.source),
    "ebnf": _ebnf,
    "choice": _choice,
    "structural_tag": _structural_tag,
    "lark": lambda grammar: LLMatcher.grammar_from_lark(grammar.source),
}


def literal(text: str) -> str:
    """A text as a term of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def read_schema(source: str, field: str) -> Any:
    """A JSON schema: an object, or true for any value. Raises InvalidRequest."""
    schema = _json(source, field)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest(field, "must be a JSON schema, that is an object")
    if _is_too_deep(schema):
        raise InvalidRequest(field, f"is nested deeper than {MAX_DEPTH} levels")
    return schema


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
    return " ".join(message.split())[:MAX_REASON]


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
        state = LLMatcher(self.tokenizer, lower(grammar), log_level=0, limits=LIMITS)
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
