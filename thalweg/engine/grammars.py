"""The grammars of an engine: compiled in a background thread, cached, advanced by committed tokens, and turned into the
token masks of a step while the device computes the step's forward.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Callable, Generic, Iterator, Mapping, Protocol, Self, Sequence, TypeVar

import numpy as np
from numpy.typing import NDArray

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar, GrammarMasks
from thalweg.core.plan import GrammarState, StepPlan
from thalweg.core.ticket import Ticket, TicketState

CACHED = 128  # compiled grammars, and errors, that are kept


class TokenMatcher(Protocol):
    """See `thalweg.text.grammar`."""

    @property
    def error(self) -> str: ...
    def copy(self) -> Self: ...
    def accept(self, tokens: Sequence[int]) -> bool: ...


M = TypeVar("M", bound=TokenMatcher)


class MatcherCompiler(Protocol[M]):
    """See `thalweg.text.grammar`."""

    @property
    def specials(self) -> tuple[int, ...]:
        """Token ids that no text consists of."""

    def compile(self, grammar: Grammar) -> M: ...
    def fill(self, wanted: Sequence[tuple[M, int]], bits: NDArray[np.int32]) -> None: ...


@dataclass(slots=True)
class _Sequence(Generic[M]):
    grammar: Grammar
    compiled: Future[M]
    is_thinking: bool  # the grammar holds after the end of the thought
    has_output: bool = False
    matcher: M | None = None  # None until the first mask

    def get_matcher(self) -> M:
        if self.matcher is None:
            self.matcher = self.compiled.result().copy()
        return self.matcher

    def accept(self, token: int) -> bool:
        """Appends a token. Returns False if the grammar forbids it."""
        is_first, self.has_output = not self.has_output, True
        if self.is_thinking:
            self.is_thinking = token != self.grammar.think_end_id
        elif is_first and token == self.grammar.think_start_id:
            self.is_thinking = True
        else:
            return self.get_matcher().accept([token])
        return True

    def copy(self) -> _Sequence[M]:
        return replace(self, matcher=None if self.matcher is None else self.matcher.copy())


class GrammarRegistry(Generic[M]):
    """The `GrammarTracker` of an engine. Only compiling runs outside the loop's thread."""

    def __init__(self, make: Callable[[], MatcherCompiler[M]], vocab: int, cached: int = CACHED) -> None:
        self._make = make  # reads the tokenizer; called once, in the background
        self._vocab, self._words, self._cached = vocab, -(-vocab // 32), cached
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiler: MatcherCompiler[M] | None = None
        self._cache: OrderedDict[tuple[str, str], Future[M]] = OrderedDict()
        self._sequences: dict[int, _Sequence[M]] = {}
        self._failed: dict[int, str] = {}
        self._text_bits: NDArray[np.int32] | None = None  # all tokens that text consists of

    def open(self, uid: int, grammar: Grammar) -> Ticket:
        key = grammar.kind, grammar.source
        if key not in self._cache:
            self._cache[key] = self._pool.submit(self._compile, grammar)
        self._cache.move_to_end(key)
        compiled = self._cache[key]
        if len(self._cache) > self._cached:
            self._cache.popitem(last=False)
        self._sequences[uid] = _Sequence(grammar, compiled, grammar.starts_in_thought)
        ticket = Ticket(0)
        compiled.add_done_callback(lambda done: _settle(ticket, done))
        return ticket

    def _compile(self, grammar: Grammar) -> M:
        if self._compiler is None:
            self._compiler = self._make()
        return self._compiler.compile(grammar)

    def advance(self, uid: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._sequences[uid].accept(token)

    def close(self, uid: int) -> None:
        self._sequences.pop(uid, None)
        self._failed.pop(uid, None)

    def pop_failed(self) -> list[tuple[int, str]]:
        failed, self._failed = self._failed, {}
        return list(failed.items())

    def fill(self, plan: StepPlan, states: Mapping[int, GrammarState]) -> GrammarMasks | None:
        """The masks of rows with a grammar, one for each sampled position. A sequence that has ended has no state and
        needs no mask. None if there are no states.
        """
        if not states:
            return None
        compiler = self._compiler
        assert compiler is not None, "a sequence runs only once its grammar has been compiled"
        sampled = [row.uid for row in plan.rows if row.emit]
        masks = [
            (i * plan.sampled_per_row + node, uid, node, sequence)
            for i, uid in enumerate(sampled)
            if uid in states
            for node, sequence in _nodes(self._sequences[uid], states[uid])
        ]
        bits = np.zeros((len(masks), self._words), dtype=np.int32)
        wanted: list[tuple[M, int]] = []
        for i, (_, _, _, sequence) in enumerate(masks):
            if sequence.is_thinking:
                bits[i] = self._thought_bits(compiler, sequence.grammar)
            else:
                wanted.append((sequence.get_matcher(), i))
        if wanted:
            compiler.fill(wanted, bits)
        for matcher, i in wanted:
            _, uid, node, sequence = masks[i]
            if not sequence.has_output and sequence.grammar.think_start_id >= 0:
                _allow(bits[i], sequence.grammar.think_start_id)
            if matcher.error:
                if node == 0:  # after a draft it may never come to that
                    self._failed[uid] = f"went beyond its limits: {matcher.error}"
                bits[i] = -1  # nobody will read the token
        return GrammarMasks(tuple(row for row, *_ in masks), bits)

    def _thought_bits(self, compiler: MatcherCompiler[M], grammar: Grammar) -> NDArray[np.int32]:
        """A thought is free text up to its end token: no end of the sequence, and no tool markup."""
        if self._text_bits is None:
            allowed = np.zeros(self._words * 32, dtype=np.uint8)
            allowed[: self._vocab] = 1
            allowed[list(compiler.specials)] = 0
            self._text_bits = np.packbits(allowed, bitorder="little").view(np.int32)
        bits = self._text_bits.copy()
        _allow(bits, grammar.think_end_id)
        return bits


def _nodes(sequence: _Sequence[M], state: GrammarState) -> Iterator[tuple[int, _Sequence[M]]]:
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


def _settle(ticket: Ticket, done: Future[M]) -> None:
    """Ends the ticket, on the compiling thread. The state is set last because the loop reads it first."""
    error = done.exception()
    if isinstance(error, InvalidRequest):
        ticket.error = error.message
    elif error is not None:
        ticket.error = f"could not be compiled ({type(error).__name__}: {error})"
    ticket.state = TicketState.OK if error is None else TicketState.FAILED
