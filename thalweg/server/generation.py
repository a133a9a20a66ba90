"""Runs the prompts of one HTTP request on the engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from starlette.requests import Request

from thalweg.core.errors import ContextOverflow, EngineDead, InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.engine.client import PromptRequest
from thalweg.engine.local import SubmitOptions
from thalweg.engine.streams import Piece
from thalweg.server.accounting import RequestAccounting
from thalweg.server.api_keys import ApiKey, RequestQuota
from thalweg.server.context import AppContext
from thalweg.server.metrics import RequestTimer
from thalweg.server.parsing import given, renamed
from thalweg.server.protocol import OpenAIRequest
from thalweg.text import stop_regex
from thalweg.text.tokenizer import Tokenizer

MAX_CHOICES = 16384  # of one HTTP request: prompts × n
UNENFORCED = "x-thalweg-unenforced"  # header: the places in schemas that are not enforced
MAX_HEADER = 4000  # characters of it; `warnings` in the response has all
MAX_TRUNCATED = 1 << 18  # tokens of a prompt before it is truncated
MAX_SCORES = 1 << 20  # log-probabilities of prompts in one response: some 100 bytes of memory each


class Prompt(NamedTuple):
    field: str  # of the body, for errors
    ids: Sequence[int]
    text: str | None  # None for a prompt of token ids


class Truncation(NamedTuple):
    """Cuts prompts that are too long."""

    tokens: int  # that are kept
    side: str = "left"  # where tokens are cut

    def cut(self, prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
        if len(prompt.ids) <= self.tokens:
            return prompt
        ids = prompt.ids[: self.tokens] if self.side == "right" else prompt.ids[-self.tokens :]
        return Prompt(prompt.field, ids, tokenizer.decode(ids, skip_special_tokens=False))


class PromptJob(NamedTuple):
    """One prompt of a request. The first fields are those of `Prompt`."""

    field: str
    ids: Sequence[int]
    text: str | None
    params: SamplingParams
    rid: str
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """Prompts and parameters that one HTTP request sends to the engine. Choices are numbered through all prompts."""

    prompts: tuple[PromptJob, ...]
    quota: RequestQuota
    accounting: RequestAccounting
    priority: int
    salt: int  # of the prefix cache
    retention: CacheRetention = RETAIN_ALL
    rename: Callable[[str], str] = str  # the engine's name of a field → the client's
    warnings: tuple[str, ...] = ()  # what the output's schemas ask for and the grammar does not enforce

    @property
    def choices(self) -> int:
        return sum(prompt.params.n for prompt in self.prompts)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        if not self.warnings:
            return {}
        places = ", ".join(warning.partition(" ")[0] for warning in self.warnings)
        return {UNENFORCED: places if len(places) <= MAX_HEADER else places[:MAX_HEADER] + "..."}


async def make_job(
    ctx: AppContext,
    request: Request,
    prompts: Sequence[PromptJob],
    priority: int | None,
    cache_salt: str | None,
    **rest: Any,
) -> GenerationJob:
    """Checks everything that can be checked before the response starts.

    Raises InvalidRequest, Overloaded, EngineDead (also while the server drains), ApiError (429).
    """
    quota: RequestQuota = request.scope["quota"]
    salt = _salt(quota.api_key, cache_salt)
    job = GenerationJob(tuple(prompts), quota, request.scope["accounting"], given(priority, 0), salt, **rest)
    if ctx.front.state == "draining":
        raise EngineDead(ctx.front.reason)
    warnings: list[str] = []
    with renamed(job.rename):
        for grammar in {id(prompt.grammar): prompt.grammar for prompt in prompts}.values():  # hashing takes a while
            warnings += await ctx.grammar_checker.check(grammar)
        _check(ctx, job)
    return replace(job, warnings=tuple(dict.fromkeys(_client_place(job, warning) for warning in warnings)))


def _client_place(job: GenerationJob, warning: str) -> str:
    field, mark, place = warning.partition("#")
    return job.rename(field) + mark + place


def asked_tokens(body: OpenAIRequest) -> tuple[str, int | None]:
    """The field that bounds the output, and its value."""
    names = ("max_completion_tokens", "max_tokens", "max_new_tokens")
    values = ((name, getattr(body, name, None)) for name in names)
    return next((pair for pair in values if pair[1] is not None), ("max_tokens", None))


def read_truncation(ctx: AppContext, body: OpenAIRequest) -> Truncation | None:
    """Raises InvalidRequest."""
    tokens, context = body.truncate_prompt_tokens, ctx.ready.context
    if tokens is None:
        return None
    if tokens == -1:
        tokens = max(context - max(given(asked_tokens(body)[1], 1), 1), 1)
    if not 1 <= tokens <= context:
        message = f"must be -1 (as many as fit) or between 1 and the context of {context}, got {tokens}"
        raise InvalidRequest("truncate_prompt_tokens", message)
    return Truncation(tokens, given(body.truncation_side, "left"))


def check_fits(ctx: AppContext, prompts: Sequence[PromptJob], body: OpenAIRequest) -> None:
    """Refuses an output that the client asks for and that the context has no room for. Raises InvalidRequest."""
    field, max_tokens = asked_tokens(body)
    context = ctx.context_len or 1 << 62
    for size in (len(prompt.ids) for prompt in prompts):
        if max_tokens is not None and size < context < size + max_tokens:
            raise ContextOverflow(field, context, f"{size} tokens", f" and asks for {max_tokens} more")


def _check(ctx: AppContext, job: GenerationJob) -> None:
    if not -(2**31) <= job.priority < 2**31:
        raise InvalidRequest("priority", f"must fit 32 bits, got {job.priority}")
    scores = 0
    for prompt in job.prompts:
        with renamed(lambda field, where=prompt.field: where if field == "prompt" else field):  # type: ignore[misc]
            ctx.front.check(prompt.ids, prompt.params, prompt.grammar)
            stop_regex.check(prompt.params.stop_regex)
        if prompt.params.prompt_logprobs is not None:
            scores += len(prompt.ids) * (1 + prompt.params.prompt_logprobs)
    if job.choices > MAX_CHOICES:
        raise InvalidRequest("n", f"makes {job.choices} outputs of this request: at most {MAX_CHOICES}, send several")
    if scores > MAX_SCORES:
        raise InvalidRequest("prompt_logprobs", f"makes {scores} entries: at most {MAX_SCORES} in one response")
    ctx.front.check_queue(job.choices)  # while the response can still have that status
    context = ctx.context_len or 0
    most = sum(
        len(ids) + params.n * min(given(params.max_tokens, context), max(context - len(ids), 0))
        for _, ids, _, params, *_ in job.prompts
    )
    job.quota.reserve(most, time.monotonic())


def prompt_fields(name: str, count: int) -> tuple[str, ...]:
    """Field names of `count` prompts of a body. Raises InvalidRequest for too many."""
    if count > MAX_CHOICES:
        raise InvalidRequest(name, f"holds {count} prompts: at most {MAX_CHOICES} in one request, send several")
    return (name,) if count == 1 else tuple(f"{name}[{i}]" for i in range(count))


async def read_prompts(
    ctx: AppContext,
    field: str,
    value: str | Sequence[str | int | list[int]],
    add_special: bool = True,
    truncation: Truncation | None = None,
) -> list[Prompt]:
    """A text, texts, token ids, or lists of token ids. add_special: texts begin with a BOS, which may be all of it.

    Raises InvalidRequest.
    """
    entries: list[Any] = [value] if isinstance(value, str) else list(value)
    if not entries:
        raise InvalidRequest(field, "is empty: give at least one token")
    kind = type(entries[0])
    if odd := next((i for i, entry in enumerate(entries) if type(entry) is not kind), 0):
        message = f"must be of the same kind as {field}[0]: all texts, all token ids, or all lists of ids"
        raise InvalidRequest(f"{field}[{odd}]", message)
    entries = [entries] if kind is int else entries
    fields = list(zip(prompt_fields(field, len(entries)), entries, strict=True))
    if kind is str:
        limit = None if truncation is None else MAX_TRUNCATED
        ids = [await ctx.tokenize(text, add_special, where, limit) for where, text in fields]
        prompts = [Prompt(where, each, text) for (where, text), each in zip(fields, ids, strict=True)]
    else:
        prompts = [Prompt(where, each, None) for where, each in fields]
    for where, each, _ in prompts:
        if not each:
            raise InvalidRequest(where, "is empty: give at least one token")
    return prompts if truncation is None else [truncation.cut(prompt, ctx.front.tokenizer) for prompt in prompts]


def _salt(api_key: ApiKey, text: str | None) -> int:
    """Only requests with the same number share cached prefixes. 0: no salt."""
    if not text and not api_key.salt_key:
        return 0
    salt = (text or "").encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(salt, digest_size=7, key=api_key.salt_key).digest())


async def run(ctx: AppContext, job: GenerationJob) -> AsyncGenerator[Piece, None]:
    """The pieces of all prompts of a job. Closing it aborts the rest."""
    quota, accounting, outcome = job.quota, job.accounting, "abort"
    accounting.model, accounting.rids = ctx.names[0], tuple(prompt.rid for prompt in job.prompts)
    ids, params = [prompt.ids for prompt in job.prompts], [prompt.params for prompt in job.prompts]
    timer = RequestTimer(ctx.metrics, accounting, ids, params, time.time())
    quota.used += accounting.prompt_tokens
    options: SubmitOptions = {"priority": job.priority, "salt": job.salt, "retention": job.retention}
    requests = [
        PromptRequest(
            prompt.ids, prompt.params, quota.api_key.scoped_rid(prompt.rid), {**options, "grammar": prompt.grammar}
        )
        for prompt in job.prompts
    ]
    try:
        with renamed(job.rename):
            async with aclosing(ctx.front.stream_all(requests)) as pieces:
                async for piece in pieces:
                    quota.used += len(piece.ids)
                    timer.piece(piece, time.time())
                    ctx.log.record(accounting, piece)
                    yield piece
    except Exception:
        outcome = "error"
        raise
    finally:
        timer.close(job.choices, outcome)
