"""Turns token deltas into pieces of text: detokenization and stop strings.

Stop strings are matched here and not in the engine. Text, tokens and log-probabilities are cut at the match, and the
caller aborts what the engine may still compute beyond it.
"""

from __future__ import annotations

import msgspec

from thalweg.core.acceptance import AcceptanceCounts
from thalweg.core.messages import RequestEvent, TokenDelta
from thalweg.core.plan import TokenLogprob
from thalweg.core.sampling import SamplingParams
from thalweg.text.detokenize import StopCut, StopMatcher
from thalweg.text.stop_regex import RegexStops
from thalweg.text.tokenizer import Tokenizer


class Piece(msgspec.Struct, frozen=True, gc=False):  # one for every token: takes 0.1 us, a frozen dataclass 2 us
    """New output of one sequence of a request. The counts are running totals of the sequence."""

    index: int  # which of the request's choices, counted through all its prompts
    text: str  # new text, cut at stop strings
    ids: tuple[int, ...]  # new tokens; the one that ended the sequence is among them, its text is not
    logprobs: tuple[TokenLogprob, ...]  # of `ids`
    finish: str | None  # None while it runs, else "stop", "length", "abort", or "error" if the model computed NaN
    stop: str | int | None  # stop string or stop token id that ended it; None for an end-of-sequence token
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...]  # first piece only: of the prompt positions 1 to the last
    at: float  # the engine's time.time() when the step retired
    admitted: float = 0.0  # the engine's time.time() when the sequence left the queue; 0.0: not known yet
    preempted: int = 0  # number of preemptions
    drafted: AcceptanceCounts | None = None  # last piece only: of its drafts
    is_sibling: bool = False  # an earlier choice has the same prompt


class Assembler:
    """Turns the deltas of one sequence into pieces, until `ended`."""

    def __init__(
        self,
        index: int,
        prompt: tuple[int, ...],
        params: SamplingParams,
        tokenizer: Tokenizer,
        request_id: str = "",
        is_sibling: bool = False,
    ) -> None:
        """request_id: "id" or "id@key", for the log and to abort it."""
        self.index, self.params, self.prompt_tokens = index, params, len(prompt)
        self.request_id, self.is_sibling = request_id, is_sibling
        self.detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
        self.stops = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self.regexes = RegexStops(params.stop_regex) if params.stop_regex else None
        self.eos = frozenset(tokenizer.eos_ids)
        self.completion_tokens = self.cached_tokens = self.preempted = 0
        self.admitted = 0.0
        self.ended = False

    def add_event(self, event: RequestEvent) -> None:
        """The next piece will report the event."""
        if event.kind == "admitted":
            self.admitted = event.at
        else:
            self.preempted += 1

    def feed(self, delta: TokenDelta, at: float) -> Piece:
        if delta.cached:
            self.cached_tokens = max(self.cached_tokens, delta.cached)
        if self.params.ends_by_text or delta.finish:
            text, used, matched = self._match_stops(delta)
            finish, stop = self._ending(delta, matched)
            self.ended = finish is not None
        else:  # the usual case: nothing can end here
            text, used, finish, stop = self.detokenizer.feed(delta.tokens), len(delta.tokens), None, None
        self.completion_tokens += used
        return Piece(
            self.index,
            text,
            delta.tokens[:used],
            delta.logprobs[:used],
            finish,
            stop,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            delta.prompt_logprobs,
            at,
            self.admitted,
            self.preempted,
            delta.acceptance,
            self.is_sibling,
        )

    def _match_stops(self, delta: TokenDelta) -> tuple[str, int, str | None]:
        """The new text, the number of tokens that it takes, and the stop string that was matched."""
        visible = delta.tokens
        if delta.stop_id >= 0 and not self.params.include_stop_str_in_output:
            visible = visible[:-1]
        parts = []
        for i, token in enumerate(visible):
            may_stop = self.completion_tokens + i >= self.params.min_tokens
            cut = self._cut(self.detokenizer.feed((token,)), may_stop)
            parts.append(cut.text)
            if cut.stop is not None:
                return "".join(parts), i + 1, cut.stop
        if delta.finish:
            cut = self._cut(self.detokenizer.finish(), self.completion_tokens + len(visible) > self.params.min_tokens)
            parts += cut.text, self.stops.finish()
            return "".join(parts), len(delta.tokens), cut.stop
        return "".join(parts), len(delta.tokens), None

    def _cut(self, text: str, may_stop: bool) -> StopCut:
        """Raises InvalidRequest if a regular expression becomes too complex."""
        cut = self.stops.feed(text, may_stop)
        if cut.stop is not None or self.regexes is None or (match := self.regexes.feed(text, may_stop)) is None:
            return cut
        shown, (end, pattern) = cut.text + self.stops.finish(), match
        return StopCut(shown[: len(shown) - len(text) + end], pattern)

    def _ending(self, delta: TokenDelta, matched: str | None) -> tuple[str | None, str | int | None]:
        if matched is not None:
            return "stop", matched
        if not delta.finish:
            return None, None
        is_named = delta.stop_id >= 0 and (delta.stop_id not in self.eos or delta.stop_id in self.params.stop_token_ids)
        return delta.finish, delta.stop_id if is_named else None
