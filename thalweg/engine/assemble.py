"""From the engine's token deltas to text pieces: detokenising and stop strings, one `Assembler` a sequence. Pure: no I/O.

Stop STRINGS belong to the front: it cuts text, tokens and log-probabilities at the match, and its finish reason wins; the engine is
told to abort what it may still be computing beyond it."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.core.messages import Delta
from thalweg.core.plan import TokenLogprob
from thalweg.core.sampling import SamplingParams
from thalweg.text.stop import StopMatcher
from thalweg.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one sequence of a request.

    index: which of the n choices. text: new text, cut at stop strings. ids: new tokens, the token that ended the sequence included
    (its text is not). finish: None while it runs, else "stop", "length" or "abort"; stop: the stop string or stop token id that ended it (None for an
    end-of-sequence token). The counts are running totals of this sequence. prompt_logprobs: with the first piece, of prompt positions
    1 to the last. at: the engine's time.time() when the step retired.
    """

    index: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: str | None
    stop: str | int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...]
    at: float


class Assembler:
    """Turns the deltas of one sequence into pieces. `ended` once a piece with a finish was made; feed nothing after that."""

    def __init__(self, index: int, prompt: tuple[int, ...], params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index, self.params, self.prompt_tokens = index, params, len(prompt)
        self.detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
        self.stops = StopMatcher(params.stop, include_stop=params.include_stop)
        self.eos = frozenset(tokenizer.eos_ids)
        self.completion_tokens = self.cached_tokens = 0
        self.ended = False

    def feed(self, delta: Delta, at: float) -> Piece:
        self.cached_tokens = max(self.cached_tokens, delta.cached)
        text, used, matched = self._text(delta)
        ids = delta.tokens[:used]
        self.completion_tokens += used
        finish, stop = self._ending(delta, matched)
        self.ended = finish is not None
        return Piece(
            self.index,
            text,
            ids,
            tuple(TokenLogprob(*entry) for entry in delta.logprobs[:used]),
            finish,
            stop,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            tuple(TokenLogprob(*entry) for entry in delta.prompt_logprobs),
            at,
        )

    def _text(self, delta: Delta) -> tuple[str, int, str | None]:
        """The new text, how many of the delta's tokens it takes, and the stop string that was found."""
        visible = delta.tokens
        if delta.stop_id >= 0 and not self.params.include_stop:
            visible = visible[:-1]
        parts = []
        for i, token in enumerate(visible):
            cut = self.stops.feed(self.detokenizer.feed((token,)))
            parts.append(cut.text)
            if cut.stop is not None:
                return "".join(parts), i + 1, cut.stop
        if delta.finish:
            cut = self.stops.feed(self.detokenizer.finish())
            parts += cut.text, self.stops.finish()
            return "".join(parts), len(delta.tokens), cut.stop
        return "".join(parts), len(delta.tokens), None

    def _ending(self, delta: Delta, matched: str | None) -> tuple[str | None, str | int | None]:
        if matched is not None:
            return "stop", matched
        if not delta.finish:
            return None, None
        named = delta.stop_id >= 0 and (delta.stop_id not in self.eos or delta.stop_id in self.params.stop_token_ids)
        return delta.finish, delta.stop_id if named else None
