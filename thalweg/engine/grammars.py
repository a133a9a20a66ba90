"""The grammars of an engine: compiled in a background thread, cached, advanced by committed tokens, and turned into the
token masks of a step while the device computes the step's forward.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar, GrammarMasks
from thalweg.core.plan import GrammarState, StepPlan
from thalweg.core.ticket import Ticket, TicketState
from thalweg.text.grammar import GrammarCompiler, GrammarMatcher

CACHED = 128  # compiled grammars, and errors, that are kept


@dataclass(slots=True)
class _Sequence:
    grammar: Grammar
    compiled: Future[GrammarMatcher] | None  # None: only the thought is constrained
    is_thinking: bool  # the grammar holds after the end of the thought
    before_trigger: bool  # nothing but a thought's length is constrained until the trigger
    has_output: bool = False
    thinking_tokens: int = 0
    matcher: GrammarMatcher | None = None  # None until the first mask

    @property
    def must_stop_thinking(self) -> bool:
        return self.is_thinking and 0 <= self.grammar.thinking_budget <= self.thinking_tokens

    @property
    def is_free(self) -> bool:
        """Whether every token may follow."""
        return (self.compiled is None or self.before_trigger) and not self.must_stop_thinking

    @property
    def stays_free(self) -> bool:
        """Whether every token may follow from here on."""
        starts = self.has_output or self.grammar.think_start_id < 0
        return self.compiled is None and not self.is_thinking and starts

    def get_matcher(self) -> GrammarMatcher:
        if self.matcher is None:
            assert self.compiled is not None, "asked for with a grammar only"
            self.matcher = self.compiled.result().copy()
        return self.matcher

    def accept(self, token: int) -> bool:
        """Appends a token. Returns False if the grammar forbids it."""
        is_first, self.has_output = not self.has_output, True
        if self.must_stop_thinking and token != self.grammar.think_end_id:
            return False
        if self.before_trigger and token == self.grammar.trigger_id:
            self.before_trigger = self.is_thinking = False
        elif self.is_thinking:
            self.is_thinking = token != self.grammar.think_end_id
            self.thinking_tokens += self.is_thinking
        elif is_first and token == self.grammar.think_start_id:
            self.is_thinking = True
        elif self.compiled is not None and not self.before_trigger:
            return self.get_matcher().accept([token])
        return True

    def copy(self) -> _Sequence:
        return replace(self, matcher=None if self.matcher is None else self.matcher.copy())


class GrammarRegistry:
    """The `GrammarTracker` of an engine. Only compiling runs outside the loop's thread."""

    def __init__(self, make: Callable[[], GrammarCompiler], vocab: int, cached: int = CACHED) -> None:
        self._make = make  # reads the tokenizer; called once, in the background
        self._vocab, self._words = vocab, -(-vocab // 32)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled = lru_cache(cached)(lambda grammar: self._pool.submit(self._compile, grammar))
        self._sequences: dict[int, _Sequence] = {}
        self._failed: dict[int, str] = {}

    def open(self, uid: int, grammar: Grammar) -> Ticket:
        if not grammar.is_set:
            self._sequences[uid] = _Sequence(grammar, None, grammar.starts_in_thought, False)
            return Ticket(0, TicketState.OK)
        compiled: Future[GrammarMatcher] = self._compiled(
            Grammar(grammar.kind, grammar.source, any_whitespace=grammar.any_whitespace)
        )
        self._sequences[uid] = _Sequence(grammar, compiled, grammar.starts_in_thought, grammar.trigger_id >= 0)
        ticket = Ticket(0)
        compiled.add_done_callback(lambda done: _settle(ticket, done))
        return ticket

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return self._make()

    def _compile(self, grammar: Grammar) -> GrammarMatcher:
        return self._compiler.compile(grammar)

    def advance(self, uid: int, tokens: Sequence[int]) -> bool:
        sequence = self._sequences[uid]
        for token in tokens:
            sequence.accept(token)
        return not sequence.stays_free

    def close(self, uid: int) -> None:
        self._sequences.pop(uid, None)
        self._failed.pop(uid, None)

    def pop_failed(self) -> list[tuple[int, str]]:
        failed, self._failed = self._failed, {}
        return list(failed.items())

    def fill(self, plan: StepPlan, states: Mapping[int, GrammarState]) -> GrammarMasks | None:
        """The masks of rows with a grammar, one for each sampled position that it constrains. A sequence that has ended
        has no state and needs no mask, nor does one before its trigger. None if no position is constrained.
        """
        sampled = [row.uid for row in plan.rows if row.samples]
        masks = [
            (i * plan.sampled_per_row + node, uid, node, sequence)
            for i, uid in enumerate(sampled)
            if uid in states
            for node, sequence in _nodes(self._sequences[uid], states[uid])
            if not sequence.is_free
        ]
        if not masks:
            return None
        bits = np.zeros((len(masks), self._words), dtype=np.int32)
        wanted: list[tuple[GrammarMatcher, int]] = []
        for i, (_, _, _, sequence) in enumerate(masks):
            if sequence.must_stop_thinking:
                _allow(bits[i], sequence.grammar.think_end_id)
            elif sequence.is_thinking:
                bits[i] = self._thought_bits(sequence.grammar)
            else:
                wanted.append((sequence.get_matcher(), i))
        if wanted:
            self._compiler.fill(wanted, bits)
        for matcher, i in wanted:
            _, uid, node, sequence = masks[i]
            if not sequence.has_output and sequence.grammar.think_start_id >= 0:
                _allow(bits[i], sequence.grammar.think_start_id)
            if matcher.error:
                if node == 0:  # after a draft it may never come to that
                    self._failed[uid] = f"went beyond its limits: {matcher.error}"
                bits[i] = -1  # nobody will read the token
        return GrammarMasks(tuple(row for row, *_ in masks), bits)

    def _thought_bits(self, grammar: Grammar) -> NDArray[np.int32]:
        """A thought is free text up to its end token: no end of the sequence, and no tool markup."""
        bits = self._text_bits.copy()
        _allow(bits, grammar.think_end_id)
        return bits

    @cached_property
    def _text_bits(self) -> NDArray[np.int32]:
        """Allows all tokens that text consists of."""
        allowed = np.zeros(self._words * 32, dtype=np.uint8)
        allowed[: self._vocab] = 1
        allowed[list(self._compiler.specials)] = 0
        return np.packbits(allowed, bitorder="little").view(np.int32)


def _nodes(sequence: _Sequence, state: GrammarState) -> Iterator[tuple[int, _Sequence]]:
    """(tree node, sequence up to it): the sequence itself and its drafts that the grammar allows."""
    sequences = {0: sequence}
    for node, draft in enumerate(state.drafts, 1):
        parent = sequences.get(state.parents[node - 1] if state.parents else node - 1)
        if parent is not None:  # nothing is accepted after a forbidden draft
            ahead = parent.copy()
            if ahead.accept(draft):
                sequences[node] = ahead
    yield from sequences.items()


def _allow(bits: NDArray[np.int32], token: int) -> None:
    bits.view(np.uint8)[token >> 3] |= 1 << (token & 7)


def _settle(ticket: Ticket, done: Future[GrammarMatcher]) -> None:
    """Ends the ticket, on the compiling thread. The state is set last because the loop reads it first."""
    error = done.exception()
    if isinstance(error, InvalidRequest):
        ticket.error = error.message
    elif error is not None:
        ticket.error = f"could not be compiled ({type(error).__name__}: {error})"
    ticket.state = TicketState.OK if error is None else TicketState.FAILED
