"""Results of retired steps: new tokens, finish reasons, accepted drafts, and the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from thalweg.core.acceptance import AcceptanceCounter
from thalweg.core.grammar import GrammarTracker
from thalweg.core.messages import Stats, TokenDelta
from thalweg.core.plan import Output, Row, requested_logprobs
from thalweg.core.request import Exit, Request
from thalweg.core.tree import tree_depth
from thalweg.scheduler.draft_length import VerifiedDrafts
from thalweg.scheduler.kv_cache import KVCacheManager

CACHED_TREES = 4096  # trees whose depth is remembered


@dataclass(slots=True)
class SchedulerCounters:
    """SchedulerCounters since the start. The integers have the names of their fields in `Stats`."""

    prefill_tokens: int = 0  # recomputed ones too
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    broken: int = 0
    wasted_drafts: int = 0
    drafter_failures: int = 0
    drafts: AcceptanceCounter = field(default_factory=AcceptanceCounter)
    steps_by_drafts: list[int] = field(default_factory=list)

    def count_step(self, num_drafts: int) -> None:
        """Counts a step that sampled and was asked for this many drafts of each sequence."""
        missing = num_drafts + 1 - len(self.steps_by_drafts)
        self.steps_by_drafts += [0] * missing
        self.steps_by_drafts[num_drafts] += 1

    def stats(self, **gauges: float) -> Stats:
        counts = {name: getattr(self, name) for name in self.__slots__}
        values: dict[str, Any] = gauges | {name: count for name, count in counts.items() if isinstance(count, int)}
        if self.drafts.verifications:
            values |= {
                "verifications": self.drafts.verifications,
                "drafted_tokens": self.drafts.drafted,
                "accepted_tokens": self.drafts.accepted,
                "drafted_at": self.drafts.drafted_at,
                "accepted_at": self.drafts.accepted_at,
            }
        return Stats(**values, steps_by_width=tuple(self.steps_by_drafts))


class StepResultProcessor:
    """Applies the outputs of a step to its requests and collects the deltas for the clients."""

    def __init__(self, kv_cache: KVCacheManager, grammars: GrammarTracker, counters: SchedulerCounters) -> None:
        self.kv_cache, self.grammars, self.counters = kv_cache, grammars, counters
        self._deltas: list[TokenDelta] = []
        self._verified: list[VerifiedDrafts] = []
        self._tree_depth = lru_cache(CACHED_TREES)(tree_depth)

    def process(self, r: Request, output: Output) -> None:
        """Applies the output of one row. If it was the request's last one, `r.exit` says so."""
        if output.is_nan:
            self._fail(r)
            return
        if output.scores:
            r.scores.extend(output.scores)
        tokens, page_size = output.tokens, self.kv_cache.page_size
        is_first = not r.out
        if tokens:
            self.kv_cache.append_tokens(r, tokens)
            if r.has_grammar:
                self.grammars.advance(r.uid, tokens)
            r.drafts, r.parents = output.drafts, output.parents
            self.counters.decode_tokens += len(tokens)
            final = len(r.prompt) + len(r.out) - 1
            if final % page_size < len(tokens):  # a page has become full
                self.kv_cache.cache_full_pages(r, final)
        elif not (r.computed == r.prefill_len == r.end and not r.rows_in_flight):
            return  # a prefill chunk; only a request for no tokens ends with its prompt
        if output.done or not tokens:
            r.exit = Exit.FINISH
            r.stop_id = tokens[-1] if tokens and tokens[-1] in r.stop_ids else -1
            r.finish = "length" if r.stop_id < 0 else "stop"
            self.counters.finished += 1
        logprobs = requested_logprobs(output.logprobs, r.needs.logprobs) if output.logprobs else ()
        if is_first:
            delta = TokenDelta(r.uid, tokens, r.finish, r.stop_id, r.cached, logprobs, tuple(r.scores))
        else:
            counts = r.acceptance.counts if r.acceptance and (r.finish or r.params.stop) else None
            delta = TokenDelta(r.uid, tokens, r.finish, r.stop_id, 0, logprobs, acceptance=counts)
        self._deltas.append(delta)

    def _fail(self, r: Request) -> None:
        """Ends a request for which the model computed NaN. It leaves nothing in the prefix cache."""
        r.exit, r.finish = Exit.ABORT, "error"
        self.counters.broken += 1
        self._deltas.append(TokenDelta(r.uid, (), "error"))

    def add_abort(self, r: Request) -> None:
        """Tells the client that `r` was aborted."""
        cached, counts = 0 if r.out else r.cached, r.acceptance.counts if r.acceptance else None
        self._deltas.append(TokenDelta(r.uid, (), "abort", cached=cached, acceptance=counts))

    def add_verification(self, r: Request, row: Row, output: Output) -> None:
        """Counts the drafts that `output` verified. If the sequence ended among them, the policy does not learn from
        the drafts beyond its end.
        """
        accepted, num_drafts, r.drafts = len(output.tokens) - 1, len(r.drafts), ()
        if num_drafts:  # the row had room for drafts, but there may have been none
            deepest = self._tree_depth(r.parents) if r.parents else num_drafts
            if r.acceptance is None:
                r.acceptance = AcceptanceCounter()
            for counter in (self.counters.drafts, r.acceptance):
                counter.add(num_drafts, deepest, accepted)
        if not output.done:
            self._verified.append(VerifiedDrafts(r, row.num_drafts, output.accepted_mask))

    def take_verified(self) -> list[VerifiedDrafts]:
        """The verifications since the last call."""
        verified, self._verified = self._verified, []
        return verified

    def take_deltas(self) -> tuple[TokenDelta, ...]:
        """The deltas since the last call, in order."""
        deltas, self._deltas = self._deltas, []
        return tuple(deltas)
