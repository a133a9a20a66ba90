"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.errors import InvalidRequest
from thalweg.engine.streams import Piece
from thalweg.server.context import AppContext
from thalweg.server.generation import PromptJob, make_job, prompt_fields
from thalweg.server.logprobs import CompletionLogprobs, CompletionLogprobsBuilder, prompt_logprobs, prompt_scores
from thalweg.server.openai_stream import OpenAIStreamEncoder, PromptLogprobs
from thalweg.server.parsing import given, sampling_params
from thalweg.server.protocol import CompletionRequest, Prompt
from thalweg.server.stream import respond
from thalweg.server.structured_output import grammar_of
from thalweg.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this route only
FIM_BEGIN, FIM_HOLE, FIM_END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


async def completions(ctx: AppContext, request: Request, body: CompletionRequest) -> Response:
    model = ctx.model(body.model)
    if body.best_of is not None and body.best_of not in (1, body.n):
        raise InvalidRequest("best_of", f"is not supported here beyond n: leave it out, got {body.best_of}")
    echoed = body.logprobs if body.echo else None
    params = sampling_params(
        body,
        ctx.defaults,
        max_tokens=given(body.max_tokens, DEFAULT_MAX_TOKENS),
        min_tokens=given(body.min_tokens, 0),
        include_stop=bool(body.include_stop_str_in_output),
        logprobs=body.logprobs,
        prompt_logprobs=max((top for top in (body.prompt_logprobs, echoed) if top is not None), default=None),
    )
    grammar = grammar_of(body, body.response_format)
    await ctx.grammar_checker.check(grammar)
    texts, prompts = await _prompts(ctx, _infill_prompt(body, ctx.front.tokenizer))
    rid, fields = ctx.rid(body.rid, request), prompt_fields("prompt", len(prompts))
    jobs = [PromptJob(ids, params, rid, field, grammar) for ids, field in zip(prompts, fields, strict=True)]
    job = make_job(ctx, request, jobs, body.priority, body.cache_salt)
    choices = [
        CompletionChoiceEncoder(ctx.front.tokenizer, body, i, prompts[i // params.n], texts[i // params.n])
        for i in range(job.choices)
    ]
    encoder = OpenAIStreamEncoder(f"cmpl-{rid}", "text_completion", model, body, job, choices)
    return await respond(ctx, request, job, encoder, body.stream)


def _infill_prompt(body: CompletionRequest, tokenizer: Tokenizer) -> Prompt:
    """The prompt; with a suffix, DeepSeek's fill-in-the-middle prompt. Raises InvalidRequest."""
    if not body.suffix:
        return body.prompt
    if missing := [mark for mark in (FIM_BEGIN, FIM_HOLE, FIM_END) if tokenizer.mark_id(mark) is None]:
        raise InvalidRequest("suffix", f"is not supported by this model: its tokenizer has no {', '.join(missing)}")
    if body.echo:
        raise InvalidRequest("echo", "does not go with suffix: the model reads them in another order")
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not all(isinstance(text, str) for text in prompts):
        raise InvalidRequest("suffix", "needs a prompt of text, not of token ids")
    return [f"{FIM_BEGIN}{text}{FIM_HOLE}{body.suffix}{FIM_END}" for text in prompts]


async def _prompts(ctx: AppContext, prompt: Prompt) -> tuple[list[str | None], list[Sequence[int]]]:
    """The texts (None for prompts of ids) and the token ids of all prompts. Raises InvalidRequest."""
    entries: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
    if not entries:
        raise InvalidRequest("prompt", "is empty: give at least one token")
    kind = type(entries[0])
    if odd := next((i for i, entry in enumerate(entries) if type(entry) is not kind), 0):
        message = "must be of the same kind as prompt[0]: all texts, all token ids, or all lists of ids"
        raise InvalidRequest(f"prompt[{odd}]", message)
    if kind is int:
        entries = [entries]
    fields = prompt_fields("prompt", len(entries))
    if kind is not str:
        return [None] * len(entries), entries
    return entries, [await ctx.tokenize_prompt(text, field) for text, field in zip(entries, fields, strict=True)]


class CompletionChoiceEncoder:
    """Writes one choice. Its first chunk has what belongs to the prompt."""

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionRequest, index: int, prompt: Sequence[int], text: str | None
    ) -> None:
        self._tokenizer, self._body, self._index, self._prompt = tokenizer, body, index, prompt
        self._text = text
        self._first = True
        self._logprobs = None if body.logprobs is None else CompletionLogprobsBuilder(tokenizer, body.logprobs)
        self._hidden = frozenset() if body.skip_special_tokens is False else tokenizer.special_ids

    def feed(self, piece: Piece) -> list[CompletionChoice]:
        choice = self.whole(piece)
        has_news = choice.text or choice.token_ids or choice.prompt_logprobs or choice.logprobs is not None
        return [choice] if has_news or piece.finish is not None else []

    def whole(self, piece: Piece) -> CompletionChoice:
        body, first, self._first = self._body, self._first, False
        choice = CompletionChoice(self._index, piece.text, None, piece.finish)
        if self._logprobs is not None:
            logprobs = self._logprobs.feed((), (), ())
            if first and body.echo:
                logprobs = self._echoed_logprobs(self._logprobs, piece)
            logprobs.extend(self._logprobs.feed(piece.ids, piece.logprobs, self._hidden))
            choice.logprobs = logprobs
        if body.return_token_ids:
            choice.token_ids = list(piece.ids)
            choice.prompt_token_ids = list(self._prompt) if first else UNSET
        if first and body.prompt_logprobs is not None:
            scores = piece.prompt_logprobs
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, self._prompt, scores, body.prompt_logprobs)
        if first and body.echo:
            if self._text is None:
                self._text = self._tokenizer.decode(self._prompt, skip_special_tokens=False)
            choice.text = self._text + choice.text
        if piece.finish is not None and piece.stop is not None:
            choice.matched_stop = piece.stop
        return choice

    def _echoed_logprobs(self, builder: CompletionLogprobsBuilder, piece: Piece) -> CompletionLogprobs:
        """The prompt's tokens. A BOS that the tokenizer has added is not in the text."""
        begin = self._tokenizer.token_bytes(self._prompt[0]).decode(errors="replace")
        hidden = self._prompt[:1] if self._text is not None and not self._text.startswith(begin) else ()
        scores = prompt_scores(self._prompt, piece.prompt_logprobs)
        logprobs = builder.feed(self._prompt[:1], scores[:1], hidden)
        logprobs.extend(builder.feed(self._prompt[1:], scores[1:], ()))
        return logprobs
