"""Structured output: the grammar of a sequence as a value, and what the scheduler needs from the component that
compiles and tracks grammars.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from thalweg.core.errors import InvalidRequest
from thalweg.core.sampling import SamplingParams
from thalweg.core.ticket import Ticket

KINDS = ("json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag", "lark")


class Grammar(msgspec.Struct, frozen=True):
    """Constraint on the output of a sequence.

    A thought may come first: the grammar holds from the token after `think_end_id` on. Without a kind it constrains
    only the thought's length.
    """

    kind: str = ""  # one of KINDS; "": no grammar
    source: str = ""  # schema (JSON text), expression or grammar; of a choice, a JSON list of strings
    starts_in_thought: bool = False  # the prompt ends inside a thought
    think_start_id: int = -1  # an output that begins with this token begins with a thought; -1: there is no such token
    think_end_id: int = -1  # ends a thought; -1: there are no thoughts
    thinking_budget: int = -1  # tokens of the thought after which `think_end_id` is forced; -1: no limit
    field: str = "grammar"  # name in error messages to the user
    trigger_id: int = -1  # the output is free up to this token, in a thought too, and then follows; -1: from the start
    any_whitespace: bool = False  # JSON may have a space or a new line between its parts
    strict: bool = False  # refuse a schema that is not enforced in full
    # Of a grammar that was built from schemas: the keywords in them that it does not enforce, each as
    # `FIELD#/POINTER how it is treated`, FIELD in the user's request and POINTER the keyword's place in the schema.
    unenforced: tuple[str, ...] = ()

    @property
    def is_set(self) -> bool:
        """Whether the output is constrained beyond its thought."""
        return bool(self.kind)

    @property
    def masks(self) -> bool:
        """Whether tokens of the output are masked."""
        return self.is_set or self.thinking_budget >= 0

    def check(self, params: SamplingParams, vocab: int) -> None:
        """Raises InvalidRequest for an unknown kind, for parameters that contradict a grammar, and for token ids that
        the vocabulary does not have.
        """
        if self.is_set and self.kind not in KINDS:
            raise InvalidRequest(self.field, f"kind {self.kind!r} is unknown; there is {', '.join(KINDS)}")
        if not all(-1 <= token < vocab for token in (self.think_start_id, self.think_end_id, self.trigger_id)):
            raise InvalidRequest(self.field, f"the token ids of its marks are outside the vocabulary of {vocab}")
        if self.thinking_budget >= 0 > self.think_end_id:
            raise InvalidRequest("thinking_budget", "needs the token that ends a thought, think_end_id")
        if self.is_set and params.ignore_eos:
            raise InvalidRequest("ignore_eos", f"contradicts {self.field}: what is complete ends with an end token")


NO_GRAMMAR = Grammar()


class GrammarMasks(NamedTuple):
    """Token masks of sampled positions."""

    rows: tuple[int, ...]  # indices among the sampled positions of a step
    bits: NDArray[np.int32]  # [len(rows), ceil(vocabulary / 32)], lowest bit first; 1 = the token is allowed


class GrammarTracker(Protocol):
    """Compiles the grammar of each sequence and follows it by the committed tokens, from `open` to `close`."""

    def open(self, uid: int, grammar: Grammar) -> Ticket:
        """Starts to compile the grammar in the background. The ticket fails, with the reason, if that is impossible."""

    def advance(self, uid: int, tokens: Sequence[int]) -> bool:
        """These tokens of the sequence are committed. False if it is unconstrained from here on."""

    def close(self, uid: int) -> None:
        """Forgets the sequence, which may never have been opened."""

    def pop_failed(self) -> list[tuple[int, str]]:
        """(uid, reason) of the sequences whose grammar exceeded its limits since the last call: they cannot
        continue.
        """
