"""The grammars of an engine: compiled in a thread of their own and cached, followed as tokens are committed, turned
into the masks of a step.

A step's masks are made between the commit that they need and B, while A of the same step runs on the device stream.
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

CACHED = 128  # compiled grammars, and refusals, that are kept


class Matcher(Protocol):
    """See `thalweg.text.grammar.Matcher`."""

    @property
    def error(self) -> str: ...
    def copy(self) -> Self: ...
    def accept(self, tokens: Sequence[int]) -> bool: ...


M = TypeVar("M", bound=Matcher)


class Compiler(Protocol[M]):
    """See `thalweg.text.grammar.Compiler`. specials: ids that no text is made of."""

    @property
    def specials(self) -> tuple[int, ...]: ...
    def compile(self, grammar: Grammar) -> M: ...
    def fill(self, wanted: Sequence[tuple[M, int]], bits: NDArray[np.int32]) -> None: ...


@dataclass(slots=True)
class _Sequence(Generic[M]):
    """thinks: the grammar waits for the end of a thought. begun: a token of it is committed. matcher: None until the
    first mask.
    """

    grammar: Grammar
    compiled: Future[M]
    thinks: bool
    begun: bool = False
    matcher: M | None = None


class GrammarRegistry(Generic[M]):
    """The `Grammars` of one engine. make: builds the compiler (it reads the tokenizer), called once, off the caller's
    thread.

    Everything but the compiling itself happens on the thread of the loop.
    """

    def __init__(self, make: Callable[[], Compiler[M]], vocab: int, cached: int = CACHED) -> None:
        self._make, self._words, self._limit = make, -(-vocab // 32), cached
        self._vocab = vocab
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiler: Compiler[M] | None = None
        self._cache: OrderedDict[tuple[str, str], Future[M]] = OrderedDict()
        self._sequences: dict[int, _Sequence[M]] = {}
        self._broken: dict[int, str] = {}
        self._prose: NDArray[np.int32] | None = None  # every token that text is made of

    def open(self, uid: int, grammar: Grammar) -> Ticket:
        compiled = self._compiled(grammar)
        self._sequences[uid] = _Sequence(grammar, compiled, grammar.starts_in_thought)
        ticket = Ticket(0)
        compiled.add_done_callback(lambda done: _settle(ticket, done))
        return ticket

    def advance(self, uid: int, tokens: Sequence[int]) -> None:
        s = self._sequences[uid]
        for token in tokens:
            self._take(s, token)

    def _take(self, s: _Sequence[M], token: int) -> bool:
        """The token comes next; False where the grammar forbids it, and nothing more can come."""
        begun, s.begun = s.begun, True
        if s.thinks:
            s.thinks = token != s.grammar.think_end_id
        elif not begun and token == s.grammar.think_start_id:
            s.thinks = True
        else:
            return self._matcher(s).accept([token])
        return True

    def close(self, uid: int) -> None:
        self._sequences.pop(uid, None)
        self._broken.pop(uid, None)

    def pop_failed(self) -> list[tuple[int, str]]:
        broken, self._broken = self._broken, {}
        return list(broken.items())

    def fill(self, plan: StepPlan, states: Mapping[int, GrammarState]) -> GrammarMasks | None:
        """The masks of the rows under a grammar, of each sampled position one; None where there is none. Who has ended
        has no state, and no mask that matters.
        """
        if not states:
            return None
        emitting = [row.uid for row in plan.rows if row.emit]
        rows: list[int] = []
        # of each mask, whose it is, how far the sequence would be there, and whether it is there
        along: list[tuple[int, _Sequence[M], bool]] = []
        for i, uid in enumerate(emitting):
            if uid in states:
                for node, s in self._along(self._sequences[uid], states[uid]):
                    rows.append(i * plan.sampled_per_row + node)
                    along.append((uid, s, node == 0))
        bits = np.zeros((len(rows), self._words), dtype=np.int32)
        wanted: list[tuple[M, int]] = []
        for i, (_, s, _) in enumerate(along):
            if s.thinks:
                bits[i] = self._thought(s.grammar)
            else:
                wanted.append((self._matcher(s), i))
        compiler = self._compiler
        assert compiler is not None, "a sequence runs only once its grammar has been compiled"
        if wanted:
            compiler.fill(wanted, bits)
        for matcher, i in wanted:
            uid, s, known = along[i]
            if not s.begun and s.grammar.think_start_id >= 0:
                _allow(bits[i], s.grammar.think_start_id)
            if matcher.error:
                if known:  # behind a draft it may never come to that
                    self._broken[uid] = f"went beyond its limits: {matcher.error}"
                bits[i] = -1  # nobody will read the token, or its sequence is broken with it
        return GrammarMasks(tuple(rows), bits)

    def _along(self, s: _Sequence[M], state: GrammarState) -> Iterator[tuple[int, _Sequence[M]]]:
        """The sequence as it is, and behind each draft that the grammar lets it have; each with the number of its node.
        Behind one that is forbidden nothing is accepted.
        """
        found = {0: s}
        for node, draft in enumerate(state.drafts, 1):
            before = found.get(state.parents[node - 1] if state.parents else node - 1)
            if before is None:
                continue
            ahead = replace(before, matcher=None if before.matcher is None else before.matcher.copy())
            if self._take(ahead, draft):
                found[node] = ahead
        yield from found.items()

    def _compiled(self, grammar: Grammar) -> Future[M]:
        key = grammar.kind, grammar.source
        if key in self._cache:
            self._cache.move_to_end(key)
        else:
            self._cache[key] = self._pool.submit(self._compile, grammar)
            if len(self._cache) > self._limit:
                self._cache.popitem(last=False)  # those who wait for it keep it
        return self._cache[key]

    def _compile(self, grammar: Grammar) -> M:
        if self._compiler is None:
            self._compiler = self._make()
        return self._compiler.compile(grammar)

    def _matcher(self, s: _Sequence[M]) -> M:
        if s.matcher is None:
            s.matcher = s.compiled.result().copy()
        return s.matcher

    def _thought(self, grammar: Grammar) -> NDArray[np.int32]:
        """A thought is free text that ends with its own token: no end of the sequence, and no markup of tools."""
        if self._prose is None:
            assert self._compiler is not None, "a sequence runs only once its grammar has been compiled"
            allowed = np.zeros(self._words * 32, dtype=np.uint8)
            allowed[: self._vocab] = 1
            allowed[list(self._compiler.specials)] = 0
            self._prose = np.packbits(allowed, bitorder="little").view(np.int32)
        bits = self._prose.copy()
        _allow(bits, grammar.think_end_id)
        return bits


def _allow(bits: NDArray[np.int32], token: int) -> None:
    bits.view(np.uint8)[token >> 3] |= 1 << (token & 7)


def _settle(ticket: Ticket, done: Future[M]) -> None:
    """Runs where the compiling ended. The state is set last: it is what the loop looks at."""
    error = done.exception()
    if isinstance(error, InvalidRequest):
        ticket.error = error.message
    elif error is not None:
        ticket.error = f"could not be compiled ({type(error).__name__}: {error})"
    ticket.state = TicketState.OK if error is None else TicketState.FAILED
