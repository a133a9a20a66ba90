"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.errors import InvalidRequest
from thalweg.engine.streams import Piece
from thalweg.server.accounting import accounting_of
from thalweg.server.context import (
    AppContext,
    GenerationJob,
    check,
    collect,
    gone,
    prompt_fields,
    quota_of,
    reply,
    run,
    salt_of,
)
from thalweg.server.infill import prompt_of
from thalweg.server.logprobs import LegacyLog, prompt_logprobs, scores_of
from thalweg.server.openai_responses import (
    ChunkEnvelope,
    CompletionChoice,
    LegacyLogprobs,
    OpenAIResponse,
    UsageCounter,
)
from thalweg.server.parsing import read
from thalweg.server.protocol import CompletionRequest, Prompt
from thalweg.server.sampling import given, openai_params
from thalweg.server.stream import EventStream, EventWriter
from thalweg.server.structured_output import grammar_of

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this route only
_decoder = msgspec.json.Decoder(CompletionRequest)


async def completions(ctx: AppContext, request: Request) -> Response:
    started = time.time()
    body = read(await request.body(), _decoder)
    model = ctx.model(body.model)
    if body.best_of is not None and body.best_of not in (1, body.n):
        raise InvalidRequest("best_of", f"is not supported here beyond n: leave it out, got {body.best_of}")
    echoed = body.logprobs if body.echo else None
    scored = max((k for k in (body.prompt_logprobs, echoed) if k is not None), default=None)
    params = openai_params(body, ctx.defaults, given(body.max_tokens, DEFAULT_MAX_TOKENS), body.logprobs, scored)
    grammar = grammar_of(body, body.response_format)
    await ctx.grammar_checker.check(grammar)
    texts, prompts = await _prompts(ctx, prompt_of(body, ctx.front.tokenizer))
    rid, many = ctx.rid(body.rid, request), len(prompts)
    fields = prompt_fields("prompt", many)
    job = GenerationJob(
        prompts,
        (params,) * many,
        (rid,) * many,
        fields,
        given(body.priority, 0),
        salt_of(request, body.cache_salt),
        started,
        (grammar,) * many,
        quota_of(request),
        accounting_of(request),
    )
    check(ctx, job)
    makers = [_Maker(ctx, body, i, prompts[i // params.n], texts[i // params.n]) for i in range(job.choices)]
    tally = UsageCounter(params.n, body.return_draft_usage)
    id, created, include_usage = f"cmpl-{rid}", int(started), body.usage_wanted

    async def stream(writer: EventWriter) -> None:
        envelope = ChunkEnvelope(id, "text_completion", created, model, include_usage)

        async def take(choice: int, piece: Piece) -> None:
            new = makers[choice].feed(piece)
            if piece.finish is not None:
                tally.ended(choice, piece)
            if new is None:
                return
            if piece.finish is not None and job.choices == 1:
                writer.hold(envelope.chunk(new), piece.at)
            else:
                await writer.write(envelope.chunk(new), piece.at)

        await run(ctx, job, take)
        if include_usage:
            writer.hold(envelope.usage(tally.usage))

    if body.stream:
        return EventStream(ctx.metrics, stream)
    ended = await collect(ctx, job, request.receive)
    if ended is None:
        return gone()
    for i, piece in enumerate(ended):
        tally.ended(i, piece)
    choices = [choice for maker, piece in zip(makers, ended, strict=True) if (choice := maker.feed(piece)) is not None]
    return reply(OpenAIResponse(id, "text_completion", created, model, choices, tally.usage))


async def _prompts(ctx: AppContext, prompt: Prompt) -> tuple[list[str | None], tuple[Sequence[int], ...]]:
    """The texts (None where ids were given) and the token ids of all prompts. Raises InvalidRequest."""
    entries: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
    if not entries:
        raise InvalidRequest("prompt", "is empty: give at least one token")
    kind = type(entries[0])
    if odd := next((i for i, entry in enumerate(entries) if type(entry) is not kind), 0):
        raise InvalidRequest(
            f"prompt[{odd}]", "must be of the same kind as prompt[0]: all texts, all token ids, or all lists of ids"
        )
    if kind is int:
        entries = [entries]
    texts: list[str | None] = []
    prompts: list[Sequence[int]] = []
    for entry, where in zip(entries, prompt_fields("prompt", len(entries)), strict=True):
        if isinstance(entry, str):
            texts.append(entry)
            prompts.append(await ctx.prompt(entry, where))
        else:
            texts.append(None)
            prompts.append(entry)
    return texts, tuple(prompts)


class _Maker:
    """Makes the chunks of one choice from its pieces; the first one brings what belongs to the prompt."""

    def __init__(
        self, ctx: AppContext, body: CompletionRequest, index: int, prompt: Sequence[int], text: str | None
    ) -> None:
        self._tokenizer, self._body, self._index, self._prompt = ctx.front.tokenizer, body, index, prompt
        self._text = text
        self._first = True
        self._log = None if body.logprobs is None else LegacyLog(self._tokenizer, body.logprobs)
        self._hidden = frozenset() if body.skip_special_tokens is False else self._tokenizer.special_ids

    def feed(self, piece: Piece) -> CompletionChoice | None:
        """None when there is nothing to say yet."""
        choice = CompletionChoice(self._index, piece.text)
        if self._log is not None:
            if self._first and self._body.echo:
                choice.logprobs = self._prompt_log(self._log, piece)
            choice.logprobs = _joined(choice.logprobs, self._log.feed(piece.ids, piece.logprobs, self._hidden))
        if self._body.return_token_ids:
            choice.token_ids = list(piece.ids)
        if self._first:
            self._first = False
            self._begin(choice, piece)
        if piece.finish is not None:
            choice.finish_reason = piece.finish
            choice.matched_stop = UNSET if piece.stop is None else piece.stop
        elif not (choice.text or choice.token_ids or choice.prompt_logprobs) and choice.logprobs is None:
            return None
        return choice

    def _begin(self, choice: CompletionChoice, piece: Piece) -> None:
        body = self._body
        if body.return_token_ids:
            choice.prompt_token_ids = list(self._prompt)
        if body.prompt_logprobs is not None:
            scores = piece.prompt_logprobs
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, self._prompt, scores, body.prompt_logprobs)
        if body.echo:
            if self._text is None:
                self._text = self._tokenizer.decode(self._prompt, skip_special_tokens=False)
            choice.text = self._text + choice.text

    def _prompt_log(self, log: LegacyLog, piece: Piece) -> LegacyLogprobs:
        """The prompt's tokens; a BOS that the tokenizer has put before a text is not in the text."""
        begin = self._tokenizer.token_bytes(self._prompt[0]).decode(errors="replace")
        added = self._text is not None and not self._text.startswith(begin)
        entries = scores_of(self._prompt, piece.prompt_logprobs)
        first = log.feed(self._prompt[:1], entries[:1], self._prompt[:1] if added else ())
        return _joined(first, log.feed(self._prompt[1:], entries[1:], ()))


def _joined(first: LegacyLogprobs | None, second: LegacyLogprobs) -> LegacyLogprobs:
    if first is None:
        return second
    tops = None if first.top_logprobs is None else [*first.top_logprobs, *(second.top_logprobs or ())]
    return LegacyLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        tops,
        first.text_offset + second.text_offset,
    )
