"""What the outputs of a step make of the requests: tokens, the end, and what fronts are told of both."""

from __future__ import annotations

from thalweg.core.grammar import GrammarTracker
from thalweg.core.messages import TokenDelta
from thalweg.core.plan import Output, requested_logprobs
from thalweg.core.request import Exit, Request
from thalweg.scheduler.holdings import Holdings
from thalweg.scheduler.tally import Tally


class Earnings:
    """news: of all requests, in order, until it is taken."""

    def __init__(self, holdings: Holdings, grammars: GrammarTracker, tally: Tally) -> None:
        self.holdings, self.grammars, self.tally = holdings, grammars, tally
        self._news: list[TokenDelta] = []

    def earn(self, r: Request, output: Output) -> None:
        """What `r` gets of a row that has retired; its last one marks it as finished."""
        if output.is_nan:
            self._broken(r)
            return
        if output.scores:
            r.scores.extend(output.scores)
        tokens, page = output.tokens, self.holdings.page
        first = not r.out
        if tokens:
            self.holdings.learn(r, tokens)
            if r.has_grammar:
                self.grammars.advance(r.uid, tokens)
            r.drafts, r.parents = output.drafts, output.parents
            self.tally.decode_tokens += len(tokens)
            final = len(r.prompt) + len(r.out) - 1
            if final % page < len(tokens):  # a page has become full
                self.holdings.share(r, final)
        elif not (r.computed == r.base == r.end and not r.flight):  # who asked for no tokens ends with its prompt
            return
        if output.done or not tokens:
            r.exit = Exit.FINISH
            r.stop_id = tokens[-1] if tokens and tokens[-1] in r.stop_ids else -1
            r.finish = "length" if r.stop_id < 0 else "stop"
            self.tally.finished += 1
        logprobs = requested_logprobs(output.logprobs, r.needs.logprobs)
        if first:
            delta = TokenDelta(r.uid, tokens, r.finish, r.stop_id, r.cached, logprobs, tuple(r.scores))
        else:
            drafted = r.acceptance.counts if r.finish or r.params.stop else None
            delta = TokenDelta(r.uid, tokens, r.finish, r.stop_id, 0, logprobs, acceptance=drafted)
        self._news.append(delta)

    def _broken(self, r: Request) -> None:
        """The model computed no numbers for `r`, which ends with an error, and leaves nothing in the prefix cache."""
        r.exit, r.finish = Exit.ABORT, "error"
        self.tally.broken += 1
        self._news.append(TokenDelta(r.uid, (), "error"))

    def aborted(self, r: Request) -> None:
        self._news.append(
            TokenDelta(r.uid, (), "abort", cached=0 if r.out else r.cached, acceptance=r.acceptance.counts)
        )

    def news(self) -> tuple[TokenDelta, ...]:
        """What happened since the last call."""
        news, self._news = self._news, []
        return tuple(news)
