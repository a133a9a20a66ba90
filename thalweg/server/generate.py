"""POST /generate: SGLang's native route. A stream's events carry the whole text so far, as its clients expect."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.acceptance import AcceptanceCounts
from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.core.sampling import SamplingParams
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
from thalweg.server.logprobs import native_logprobs, native_tops, scores_of
from thalweg.server.parsing import named, read
from thalweg.server.protocol import GenerateRequest, NativeSampling
from thalweg.server.sampling import given, native_params
from thalweg.server.stream import EventStream, EventWriter
from thalweg.server.structured_output import grammar_of

SHORT = 4096  # tokens, those of the prompt that are scored included, up to which every piece makes an event
DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's, for this route only
_NAMES = {
    name: f"sampling_params.{name}"
    for name in SamplingParams.__struct_fields__
    if name not in ("max_tokens", "min_tokens", "include_stop", "logprobs", "prompt_logprobs")
} | {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "include_stop": "sampling_params.no_stop_trim",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
}
_decoder = msgspec.json.Decoder(GenerateRequest)
_encode = msgspec.json.Encoder().encode


async def generate(ctx: AppContext, request: Request) -> Response:
    started = time.time()
    body = read(await request.body(), _decoder)
    body.refuse()
    field, prompts = await _prompts(ctx, body)
    batch = isinstance(body.text, list) or body.input_ids is not None and isinstance(body.input_ids[0], list)
    many = len(prompts)
    rids, params = _rids(ctx, body, request, many), _params(ctx, body, prompts)
    grammars = _grammars(body, many)
    for grammar in grammars:
        await ctx.grammar_checker.check(grammar)
    salt = salt_of(request, given(body.cache_salt, body.extra_key))
    fields, priority = prompt_fields(field, many), given(body.priority, 0)
    quota, accounting = quota_of(request), accounting_of(request)
    job = GenerationJob(prompts, params, rids, fields, priority, salt, started, grammars, quota, accounting)
    with named(**_NAMES):
        check(ctx, job)
    makers = [_Maker(ctx, body, job, i) for i in range(many) for _ in range(params[i].n)]
    listed = batch or len(makers) > 1

    async def stream(writer: EventWriter) -> None:
        async def take(choice: int, piece: Piece) -> None:
            makers[choice].add(piece)
            if not makers[choice].due(piece):
                return
            value = makers[choice].event(piece)
            if listed:
                value["index"] = choice
            await writer.write(b"data: " + _encode(value) + b"\n\n", piece.at)

        await run(ctx, job, take)

    if body.stream:
        return EventStream(ctx.metrics, stream)
    ended = await collect(ctx, job, request.receive)
    if ended is None:
        return gone()
    for maker, piece in zip(makers, ended, strict=True):
        maker.add(piece)
    values = [maker.event(piece) for maker, piece in zip(makers, ended, strict=True)]
    return reply(values if listed else values[0])


async def _prompts(ctx: AppContext, body: GenerateRequest) -> tuple[str, tuple[Sequence[int], ...]]:
    """The field that has the prompts, and their token ids. Raises InvalidRequest."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("text", "give either text or input_ids, and not both")
    if body.input_ids is not None:
        return "input_ids", _id_lists(body.input_ids)
    texts = [body.text] if isinstance(body.text, str) else body.text
    if not texts:
        raise InvalidRequest("text", "is empty: give at least one text")
    fields = prompt_fields("text", len(texts))
    return "text", tuple([await ctx.prompt(text, field) for text, field in zip(texts, fields, strict=True)])


def _id_lists(ids: Sequence[int | list[int]]) -> tuple[Sequence[int], ...]:
    lists = [entry for entry in ids if isinstance(entry, list)]
    if not ids:
        raise InvalidRequest("input_ids", "is empty: give at least one token id")
    if not lists:
        return ([entry for entry in ids if isinstance(entry, int)],)
    if len(lists) != len(ids):
        odd = next(i for i, entry in enumerate(ids) if not isinstance(entry, list))
        raise InvalidRequest(f"input_ids[{odd}]", "must be a list of token ids as the others are")
    return tuple(lists)


def _rids(ctx: AppContext, body: GenerateRequest, request: Request, many: int) -> tuple[str, ...]:
    if isinstance(body.rid, list):
        if len(body.rid) != many:
            raise InvalidRequest(
                "rid", f"has {len(body.rid)} ids for {many} prompts: give one for each, or one for all"
            )
        return tuple(ctx.rid(rid, request) for rid in body.rid)
    return (ctx.rid(body.rid, request),) * many


def _params(ctx: AppContext, body: GenerateRequest, prompts: Sequence[Sequence[int]]) -> tuple[SamplingParams, ...]:
    given_params = body.sampling_params
    if not isinstance(given_params, list):
        given_params = [given(given_params, NativeSampling())] * len(prompts)
    if len(given_params) != len(prompts):
        raise InvalidRequest("sampling_params", f"has {len(given_params)} entries for {len(prompts)} prompts")
    start, top = given(body.logprob_start_len, -1), given(body.top_logprobs_num, 0)
    logprobs = top if body.return_logprob else None
    return tuple(
        native_params(
            one,
            ctx.defaults,
            given(one.max_new_tokens, DEFAULT_MAX_NEW_TOKENS),
            logprobs,
            logprobs if 0 <= start < len(prompt) else None,
        )
        for one, prompt in zip(given_params, prompts, strict=True)
    )


def _grammars(body: GenerateRequest, many: int) -> tuple[Grammar, ...]:
    """A structure stands in the sampling parameters, as SGLang has it, or beside them for all."""
    shared, params = grammar_of(body), body.sampling_params
    each = params if isinstance(params, list) else [given(params, NativeSampling())] * many
    own = tuple(grammar_of(one, where="sampling_params.") for one in each)
    if shared.is_set and (both := next((one for one in own if one.is_set), None)):
        raise InvalidRequest(both.field, f"asks for a second structure beside {shared.field}: give one")
    return (shared,) * many if shared.is_set else own


def _speculation(drafted: AcceptanceCounts) -> dict[str, Any]:
    """What became of a sequence's drafts, under SGLang's names."""
    return {
        "spec_verify_ct": drafted.verifications,
        "spec_draft_token_num": drafted.drafted,
        "spec_accept_token_num": drafted.accepted,
        "spec_accept_length": drafted.mean_length,
        "spec_accept_rate": drafted.rate,
        "spec_accept_histogram": drafted.histogram,
    }


class _Maker:
    """Makes the events of one choice: each is complete and supersedes the one before."""

    def __init__(self, ctx: AppContext, body: GenerateRequest, job: GenerationJob, prompt: int) -> None:
        self._tokenizer, self._body = ctx.front.tokenizer, body
        self._prompt, self._rid, self._started = job.prompts[prompt], job.rids[prompt], job.started
        self._text = ""
        self._ids: list[int] = []
        self._logs: dict[str, list[Any]] = {}
        self._unsaid = 0  # tokens since the last event

    def add(self, piece: Piece) -> None:
        self._text += piece.text
        self._ids += piece.ids
        self._unsaid += len(piece.ids)
        if self._body.return_logprob:
            self._log(piece)

    def due(self, piece: Piece) -> bool:
        """Whether to make an event. As each says everything again, a long answer says it only when it has grown by a
        256th: the bytes of a stream grow as its length, not as the square of it.
        """
        said = len(self._ids) + len(self._logs.get("input_token_logprobs", ()))
        return piece.finish is not None or said <= SHORT or self._unsaid * 256 >= said

    def event(self, piece: Piece) -> dict[str, Any]:
        """All there is so far. piece: the latest."""
        self._unsaid = 0
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": self._finish(piece),
            "prompt_tokens": piece.prompt_tokens,
            "completion_tokens": piece.completion_tokens,
            "cached_tokens": piece.cached_tokens,
            **self._logs,
        }
        if piece.finish is not None:
            meta["e2e_latency"] = time.time() - self._started
        if piece.drafted is not None:
            meta |= _speculation(piece.drafted)
        return {"text": self._text, "output_ids": self._ids, "meta_info": meta}

    def _finish(self, piece: Piece) -> dict[str, Any] | None:
        if piece.finish is None:
            return None
        if piece.finish == "length":
            return {"type": "length", "length": piece.completion_tokens}
        if piece.finish == "abort":
            return {"type": "abort", "message": "aborted"}
        return {"type": "stop", "matched": self._ids[-1] if piece.stop is None and self._ids else piece.stop}

    def _log(self, piece: Piece) -> None:
        """input_token_logprobs from logprob_start_len on, output_token_logprobs, and the alternatives of both."""
        body, tokenizer, logs = self._body, self._tokenizer, self._logs
        top, text = given(body.top_logprobs_num, 0), bool(body.return_text_in_logprobs)
        if not logs:
            start = given(body.logprob_start_len, -1)
            start = start if 0 <= start < len(self._prompt) else len(self._prompt)
            scores = scores_of(self._prompt, piece.prompt_logprobs)[start:]
            logs["input_token_logprobs"] = native_logprobs(tokenizer, self._prompt[start:], scores, text)
            logs["output_token_logprobs"] = []
            if top:
                logs["input_top_logprobs"] = native_tops(tokenizer, scores, top, text)
                logs["output_top_logprobs"] = []
        logs["output_token_logprobs"] += native_logprobs(tokenizer, piece.ids, piece.logprobs, text)
        if top:
            logs["output_top_logprobs"] += native_tops(tokenizer, piece.logprobs, top, text)
