"""Results of the Python API, with vLLM's names, and how they grow by the pieces of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from thalweg.core.plan import TokenLogprob
from thalweg.engine.streams import Piece
from thalweg.llm.prompts import PreparedRequest
from thalweg.server.logprobs import token_name
from thalweg.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """One token at one position."""

    logprob: float  # natural logarithm of the model's own probability
    rank: int | None = None  # 1 is the most likely token; None: below the alternatives that were asked for
    decoded_token: str | None = None  # part of a character is written `bytes:\\xe4\\xb8`


@dataclass(slots=True)
class CompletionOutput:
    """One of the n outputs of a prompt."""

    index: int  # from 0 to n - 1
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # with the token that ended it, whose text is left out
    cumulative_logprob: float | None = None  # sum over token_ids; None unless logprobs were requested
    logprobs: list[dict[int, Logprob]] | None = None  # of token_ids, each first in its dict; None: not requested
    finish_reason: str | None = None  # "stop", "length", "abort", or "error" if the model computed NaN; None: it runs
    stop_reason: str | int | None = None  # stop string or stop token id that ended it; None for an end token

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What became of one prompt."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token; None: not requested
    finished: bool = False  # every output has ended
    num_cached_tokens: int = 0  # prompt tokens that were not computed, but found in the prefix cache
    warnings: tuple[str, ...] = ()  # parts of the grammar's schemas that are not enforced


class OutputBuilder:
    """Builds the RequestOutput of one prompt."""

    def __init__(self, request: PreparedRequest, tokenizer: Tokenizer) -> None:
        self.request, self._tokenizer = request, tokenizer
        outputs = [self._empty(index) for index in range(request.params.n)]
        text, ids = request.prompt, list(request.ids)
        self.output = RequestOutput(request.request_id, text, ids, outputs, warnings=request.warnings)
        self._running = request.params.n

    def add(self, piece: Piece) -> None:
        output = self.output
        _add(output.outputs[piece.index], piece, self._logprobs(piece))
        output.num_cached_tokens = max(output.num_cached_tokens, piece.cached_tokens)
        if piece.prompt_logprobs and piece.index == 0:
            output.prompt_logprobs = [None, *self._named(output.prompt_token_ids[1:], piece.prompt_logprobs)]
        self._running -= piece.finish is not None
        output.finished = not self._running

    def snapshot(self) -> RequestOutput:
        """A copy of everything so far."""
        return replace(self.output, outputs=[_copy(output) for output in self.output.outputs])

    def delta(self, piece: Piece) -> RequestOutput:
        """What the last piece has added, with one output."""
        new = self._empty(piece.index)
        _add(new, piece, self._logprobs(piece))
        new.cumulative_logprob = self.output.outputs[piece.index].cumulative_logprob
        return replace(self.output, outputs=[new])

    def end(self, reason: str) -> None:
        """Ends the outputs that still run."""
        for output in self.output.outputs:
            output.finish_reason = output.finish_reason or reason
        self.output.finished = True

    def _empty(self, index: int) -> CompletionOutput:
        output = CompletionOutput(index)
        if self.request.params.logprobs is not None:
            output.logprobs, output.cumulative_logprob = [], 0.0
        return output

    def _logprobs(self, piece: Piece) -> Iterator[dict[int, Logprob]]:
        return self._named(piece.ids, piece.logprobs, not self.request.params.logprob_token_ids)

    def _named(
        self, ids: Sequence[int], entries: Sequence[TokenLogprob], ranked: bool = True
    ) -> Iterator[dict[int, Logprob]]:
        """The token of each position first, then the alternatives. ranked: these are the most likely, best first."""
        for token, entry in zip(ids, entries, strict=bool(entries)):
            rank = entry.top_ids.index(token) + 1 if ranked and token in entry.top_ids else None
            named = {token: Logprob(entry.logprob, rank, self._name(token))}
            for place, (other, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
                if other != token:
                    named[other] = Logprob(logprob, place if ranked else None, self._name(other))
            yield named

    def _name(self, token: int) -> str:
        return token_name(self._tokenizer.token_bytes(token))


def _add(output: CompletionOutput, piece: Piece, logprobs: Iterator[dict[int, Logprob]]) -> None:
    output.text += piece.text
    output.token_ids += piece.ids
    output.finish_reason, output.stop_reason = piece.finish, piece.stop
    if output.logprobs is not None and output.cumulative_logprob is not None:
        output.logprobs += logprobs
        output.cumulative_logprob += sum(entry.logprob for entry in piece.logprobs)


def _copy(output: CompletionOutput) -> CompletionOutput:
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return replace(output, token_ids=list(output.token_ids), logprobs=logprobs)
