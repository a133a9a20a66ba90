"""From the engine's token deltas to text pieces: detokenising and stop strings, one `Assembler` a sequence. Pure: no
I/O.

Stop STRINGS belong to the front: it cuts text, tokens and log-probabilities at the match, and its finish reason wins;
the engine is told to abort what it may still be computing beyond it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from thalweg.core.acceptance import AcceptanceCounts
from thalweg.core.messages import RequestEvent, TokenDelta
from thalweg.core.plan import TokenLogprob
from thalweg.core.sampling import SamplingParams
from thalweg.text.stop import StopMatcher
from thalweg.text.tokenizer import Tokenizer


class Piece(msgspec.Struct, frozen=True, gc=False):  # made for every token: 0.1 us; a frozen dataclass takes 2
    """News of one sequence of a request.

    index: which of the n choices. text: new text, cut at stop strings. ids: new tokens, the token that ended the
    sequence included (its text is not). finish: None while it runs, else "stop", "length", "abort", or "error"
    (`core.messages.Delta`); stop: the stop string or stop token id that ended it (None for an end-of-sequence token).
    The counts are running totals of this sequence. prompt_logprobs: with the first piece, of prompt positions 1 to the
    last. at: the engine's time.time() when the step retired. admitted: its time.time() when the sequence left the
    queue, 0.0 while that is not known. preempted: how often it went back into it. drafted: with the last piece, what
    became of its drafts, None where there were none.
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
    admitted: float = 0.0
    preempted: int = 0
    drafted: AcceptanceCounts | None = None


class Assembler:
    """Turns the deltas of one sequence into pieces. `ended` once a piece with a finish was made; feed nothing after
    that.
    """

    def __init__(self, index: int, prompt: tuple[int, ...], params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index, self.params, self.prompt_tokens = index, params, len(prompt)
        self.detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
        self.stops = StopMatcher(params.stop, include_stop=params.include_stop)
        self.eos = frozenset(tokenizer.eos_ids)
        self.completion_tokens = self.cached_tokens = self.preempted = 0
        self.admitted = 0.0
        self.ended = False

    def mark(self, mark: RequestEvent) -> None:
        """Notes what befell the sequence; the next piece says it."""
        if mark.kind == "admitted":
            self.admitted = mark.at
        else:
            self.preempted += 1

    def feed(self, delta: TokenDelta, at: float) -> Piece:
        if delta.cached:
            self.cached_tokens = max(self.cached_tokens, delta.cached)
        if self.params.stop or delta.finish:
            text, used, matched = self._text(delta)
            finish, stop = self._ending(delta, matched)
            self.ended = finish is not None
        else:  # nearly all pieces: nothing can end here
            text, used, finish, stop = self.detokenizer.feed(delta.tokens), len(delta.tokens), None, None
        self.completion_tokens += used
        return Piece(
            self.index,
            text,
            delta.tokens[:used],
            _entries(delta.logprobs[:used]),
            finish,
            stop,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            _entries(delta.prompt_logprobs),
            at,
            self.admitted,
            self.preempted,
            delta.acceptance,
        )

    def _text(self, delta: TokenDelta) -> tuple[str, int, str | None]:
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

    def _ending(self, delta: TokenDelta, matched: str | None) -> tuple[str | None, str | int | None]:
        if matched is not None:
            return "stop", matched
        if not delta.finish:
            return None, None
        named = delta.stop_id >= 0 and (delta.stop_id not in self.eos or delta.stop_id in self.params.stop_token_ids)
        return delta.finish, delta.stop_id if named else None


def _entries(logprobs: Sequence[tuple[float, tuple[int, ...], tuple[float, ...]]]) -> tuple[TokenLogprob, ...]:
    return tuple([TokenLogprob(*entry) for entry in logprobs]) if logprobs else ()


class DeltaQueue:
    """What the engine said of one request and its stream has not taken yet: for each sequence one delta, so that a
    stream which falls behind gets more tokens at once, not more wake-ups, and a reader that never reads costs one delta
    a sequence.
    """

    __slots__ = ("deltas", "error", "waiter")

    def __init__(self) -> None:
        self.deltas: dict[int, tuple[TokenDelta, float]] = {}
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta, at: float) -> None:
        held = self.deltas.get(delta.uid)
        self.deltas[delta.uid] = (delta, at) if held is None else (held[0].merge(delta), held[1])
        self._wake()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._wake()

    async def take(self) -> list[tuple[TokenDelta, float]]:
        """All there is, in order of arrival; waits for the first. Raises the error with which the engine failed the
        request.
        """
        while not self.deltas:
            if self.error is not None:
                raise self.error
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        taken, self.deltas = list(self.deltas.values()), {}
        return taken

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
