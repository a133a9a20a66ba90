"""Results of retired steps: new tokens, finish reasons, accepted drafts, and the engine's counters."""

from __future__ import annotations

from functools import lru_cache

from thalweg.core.acceptance import AcceptanceCounter
from thalweg.core.grammar import GrammarTracker
from thalweg.core.messages import Stats, TokenDelta
from thalweg.core.plan import Output, requested_logprobs
from thalweg.core.request import ReleaseReason, Request
from thalweg.core.tree import tree_depth
from thalweg.scheduler.kv_cache import KVCacheManager

CACHED_TREES = 4096  # trees whose depth is remembered


class StepResultProcessor:
    """Applies the outputs of a step to its requests and collects the deltas for the clients."""

    def __init__(self, kv_cache: KVCacheManager, grammars: GrammarTracker, counters: Stats) -> None:
        self.kv_cache, self.grammars, self.counters = kv_cache, grammars, counters
        self.drafts = AcceptanceCounter()  # of all requests
        self._deltas: list[TokenDelta] = []
        self._tree_depth = lru_cache(CACHED_TREES)(tree_depth)

    def process(self, r: Request, output: Output) -> None:
        """Applies the output of one row. Sets `r.release_reason` if the request has finished."""
        if output.is_nan:
            self._fail(r)
            return
        if output.prompt_logprobs:
            r.prompt_logprobs.extend(output.prompt_logprobs)
        tokens, page_size = output.tokens, self.kv_cache.page_size
        is_first = not r.output_ids
        if tokens:
            self.kv_cache.append_tokens(r, tokens)
            if r.has_grammar:
                r.has_grammar = self.grammars.advance(r.uid, tokens)
            self.counters.decode_tokens += len(tokens)
            final = len(r.prompt) + len(r.output_ids) - 1
            if final % page_size < len(tokens):  # a page has become full
                self.kv_cache.cache_full_pages(r, final)
        elif not (r.num_computed_tokens == r.prefill_len == r.end and not r.rows_in_flight):
            return  # a prefill chunk; only a request for no tokens ends with its prompt
        if output.done or not tokens:
            r.release_reason = ReleaseReason.FINISH
            r.stop_id = tokens[-1] if tokens and tokens[-1] in r.stop_ids else -1
            r.finish = "length" if r.stop_id < 0 else "stop"
            self.counters.finished += 1
        most = max(r.needs.logprobs, r.needs.num_logprob_ids)
        logprobs = requested_logprobs(output.logprobs, most) if output.logprobs else ()
        cached, prompt_logprobs = (r.num_cached_tokens, tuple(r.prompt_logprobs)) if is_first else (0, ())
        if prompt_logprobs:
            self.kv_cache.keep_prompt_logprobs(r)
        counts = r.acceptance.counts if r.acceptance and (r.finish or r.params.ends_by_text) else None
        self._deltas.append(
            TokenDelta(
                r.uid, tokens, r.finish, r.stop_id, cached, logprobs, prompt_logprobs=prompt_logprobs, acceptance=counts
            )
        )

    def _fail(self, r: Request) -> None:
        """Ends a request for which the model computed NaN. The prefix cache keeps only the pages that it shared."""
        r.release_reason, r.finish = ReleaseReason.ABORT, "error"
        self.counters.broken += 1
        self._deltas.append(TokenDelta(r.uid, (), "error"))

    def add_abort(self, r: Request) -> None:
        """Tells the client that `r` was aborted."""
        cached, counts = 0 if r.output_ids else r.num_cached_tokens, r.acceptance.counts if r.acceptance else None
        self._deltas.append(TokenDelta(r.uid, (), "abort", cached=cached, acceptance=counts))

    def add_verification(self, r: Request, output: Output) -> None:
        """Counts the drafts that `output` verified."""
        accepted, num_drafts, parents = len(output.tokens) - 1, len(r.drafts), r.parents
        r.drafts, r.parents = (), ()
        if num_drafts:  # the plan allowed drafts, but there may have been none
            deepest = self._tree_depth(parents) if parents else num_drafts
            if r.acceptance is None:
                r.acceptance = AcceptanceCounter()
            for counter in (self.drafts, r.acceptance):
                counter.add(num_drafts, deepest, accepted)

    def take_deltas(self) -> tuple[TokenDelta, ...]:
        """The deltas since the last call, in order."""
        deltas, self._deltas = self._deltas, []
        return tuple(deltas)
