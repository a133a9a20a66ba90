"""What every route works with, and the one way in which routes run requests on the front."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from thalweg.config.server import ServerOptions
from thalweg.core.errors import EngineDead, InvalidRequest, engine_unavailable
from thalweg.core.grammar import Grammar
from thalweg.core.request import QueueReservation
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.engine.client import EngineClient
from thalweg.engine.streams import Piece
from thalweg.server.accounting import RequestAccounting
from thalweg.server.api_keys import RequestQuota
from thalweg.server.errors import ApiError, ErrorInfo
from thalweg.server.grammar_check import GrammarChecker
from thalweg.server.logs import NoLog, Take
from thalweg.server.metrics import RequestTimer, ServerMetrics
from thalweg.server.parsing import named
from thalweg.server.responses.store import ResponseStore
from thalweg.server.sampling import given
from thalweg.server.stream import DisconnectWatch
from thalweg.text.chat import ChatFormat
from thalweg.text.retention import ThinkingRetention
from thalweg.text.tokenizer import Tokenizer

THREADS = 4  # for what takes long
LONG_TEXT = 8192  # characters from which a text is tokenized on a thread: running streams must not wait for it
MAX_RID = 128
MAX_CHOICES = 16384  # of one HTTP request: prompts × n
MAX_SCORES = 1 << 20  # log-probabilities of prompts in one answer: some 100 bytes of memory each

Listen = Callable[[RequestAccounting, Take], Take]
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


def _tokens(tokenizer: Tokenizer, text: str, add_special: bool, limit: int) -> list[int] | None:
    """None for a text that surely has more than `limit` tokens."""
    return None if tokenizer.exceeds(text, limit) else tokenizer.encode(text, add_special)


def reply(value: object, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type="application/json")


def gone() -> Response:
    """The answer that nobody reads, since the client has left (nginx's status for that)."""
    return Response(status_code=499)


@dataclass(frozen=True, slots=True, eq=False)
class AppContext:
    """names: of the model, the first one shown. path: of its checkpoint, as the user gave it. defaults: what requests
    that do not say get. started: time.time(). shelf: the responses that are kept. history: what the next turn of a
    conversation renders again.
    """

    front: EngineClient
    chat: ChatFormat
    options: ServerOptions
    names: tuple[str, ...]
    path: str
    defaults: SamplingParams
    metrics: ServerMetrics
    started: float
    store: ResponseStore
    history: ThinkingRetention
    grammar_checker: GrammarChecker = field(default_factory=GrammarChecker)
    pool: Executor = field(default_factory=partial(ThreadPoolExecutor, THREADS, "desk"))
    listen: Listen = NoLog().listen

    def model(self, asked: str | None) -> str:
        """The name to answer with. No name, "" and "default" are the model that is served; an unknown name is a 404."""
        if not asked or asked == "default":
            return self.names[0]
        if asked not in self.names:
            message = f"model {asked!r} does not exist here; this server has {', '.join(self.names)}"
            raise ApiError(ErrorInfo(404, message, "not_found_error", "model", "model_not_found"))
        return asked

    def rid(self, asked: str | None, request: Request) -> str:
        """The id of a request: the body's own, or else the one that its header brought or the server made. Raises
        InvalidRequest.
        """
        if asked is None:
            return str(request.scope["request_id"])
        if clean_rid(asked) is None:
            raise InvalidRequest("rid", f"must be 1 to {MAX_RID} letters, digits and -_.:/ characters")
        return asked

    async def prompt(self, text: str, field: str) -> list[int]:
        """Token ids of a prompt. Raises InvalidRequest, for an empty one too: a lone BOS is not what its sender
        meant.
        """
        if not text:
            raise InvalidRequest(field, "is empty: give at least one character")
        return await self.tokens(text, True, field, self.context)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence. Raises EngineDead when there is no engine to ask."""
        if self.front.ready is None:
            raise engine_unavailable(self.front.state, self.front.reason)
        return self.front.ready.context

    async def tokens(self, text: str, add_special: bool, field: str, limit: int) -> list[int]:
        """Token ids of a text. Raises InvalidRequest when it cannot be written as UTF-8, and before much work is done
        on a text that is far longer than `limit` tokens.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(field, "holds half a surrogate pair: not valid Unicode") from None
        if len(text) < LONG_TEXT:
            await asyncio.sleep(0)  # a body may hold many of them: between two, others have their turn
            return self.front.tokenizer.encode(text, add_special)
        ids = await self.aside(partial(_tokens, self.front.tokenizer, text, add_special, limit))
        if ids is None or len(ids) > limit:
            message = (
                f"has {len(text)} characters, which make more than the {limit} tokens that there is room for:"
                " shorten it"
            )
            raise InvalidRequest(field, message)
        return ids

    async def aside(self, work: Callable[[], T]) -> T:
        """Has the work done on a thread: streams go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """What one HTTP request asks of the front: prompts (token ids), each with its parameters, its id and the field it
    stands in.

    Choice numbers run through all of them: those of prompt i begin at the sum of n before it. keep: what of the
    sequences the prefix cache keeps.
    """

    prompts: tuple[Sequence[int], ...]
    params: tuple[SamplingParams, ...]
    rids: tuple[str, ...]
    fields: tuple[str, ...]
    priority: int
    salt: int
    started: float
    grammars: tuple[Grammar, ...]
    quota: RequestQuota
    accounting: RequestAccounting
    keep: CacheRetention = RETAIN_ALL

    def grammar(self, prompt: int) -> Grammar:
        """What the outputs of a prompt must match."""
        return self.grammars[prompt]

    @property
    def firsts(self) -> list[int]:
        """The number of each prompt's first choice, and behind them that of all choices."""
        return list(accumulate((params.n for params in self.params), initial=0))

    @property
    def choices(self) -> int:
        return self.firsts[-1]


def check(ctx: AppContext, job: GenerationJob) -> None:
    """Refuses before anything is streamed. Raises InvalidRequest, Overloaded, EngineDead (while the server drains,
    too).
    """
    if ctx.front.state == "draining":
        raise EngineDead(ctx.front.reason)
    if not -(2**31) <= job.priority < 2**31:
        raise InvalidRequest("priority", f"must fit 32 bits, got {job.priority}")
    for i, (prompt, params, place) in enumerate(zip(job.prompts, job.params, job.fields, strict=True)):
        with named(prompt=place):
            ctx.front.check(prompt, params)
            job.grammar(i).check(params)
    if job.choices > MAX_CHOICES:
        raise InvalidRequest("n", f"makes {job.choices} outputs of this request: at most {MAX_CHOICES}, send several")
    scores = sum(
        len(prompt) * (1 + params.prompt_logprobs)
        for prompt, params in zip(job.prompts, job.params, strict=True)
        if params.prompt_logprobs is not None
    )
    if scores > MAX_SCORES:
        raise InvalidRequest("prompt_logprobs", f"makes {scores} entries: at most {MAX_SCORES} in one answer")
    with ctx.front.reserve(job.choices):
        pass  # now there is room: what streams has a status of its own only before it streams
    job.quota.reserve(_most(ctx, job))


def _most(ctx: AppContext, job: GenerationJob) -> int:
    """The tokens that a job can use at most: its prompts once each, and all outputs."""
    context = 0 if ctx.front.ready is None else ctx.front.ready.context
    return sum(
        len(prompt) + params.n * min(given(params.max_tokens, context), max(context - len(prompt), 0))
        for prompt, params in zip(job.prompts, job.params, strict=True)
    )


async def run(ctx: AppContext, job: GenerationJob, take: Take) -> None:
    """Runs all prompts of a job at once; `take(choice, piece)` gets every piece. Cancelling it aborts what still
    runs.
    """
    accounting, left = job.accounting, "error"
    accounting.model, accounting.rids = ctx.names[0], job.rids
    timer = RequestTimer(ctx.metrics, accounting)
    timer.submit(job.prompts, job.params, time.time())
    try:
        await _run_all(ctx, job, timer, ctx.listen(accounting, take))
    except asyncio.CancelledError:
        left = "abort"
        raise
    finally:
        timer.close(job.choices, left)


async def _run_all(ctx: AppContext, job: GenerationJob, timer: RequestTimer, take: Take) -> None:
    if len(job.prompts) == 1:
        return await _run(ctx, job, 0, 0, timer, take)
    try:
        with ctx.front.reserve(job.choices) as room:  # all of them, or none
            async with asyncio.TaskGroup() as group:
                for i, first in enumerate(job.firsts[:-1]):
                    group.create_task(_run(ctx, job, i, first, timer, take, room))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _run(
    ctx: AppContext,
    job: GenerationJob,
    i: int,
    first: int,
    timer: RequestTimer,
    take: Take,
    room: QueueReservation | None = None,
) -> None:
    """first: the number of the first choice of prompt i."""
    params = job.params[i]
    pieces = ctx.front.stream(
        job.prompts[i],
        params,
        request_id=job.quota.api_key.mark(job.rids[i]),
        priority=job.priority,
        salt=job.salt,
        grammar=job.grammar(i),
        retention=job.keep,
        reservation=room,
    )
    quota = job.quota
    quota.used += len(job.prompts[i])
    async with aclosing(pieces):
        async for piece in pieces:
            choice = first + piece.index
            quota.used += len(piece.ids)
            timer.piece(choice, piece, time.time())
            await take(choice, piece)
            if piece.finish is not None:
                timer.ended(choice, piece, time.time())


def merge(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one choice as one: a response that is not streamed is a stream of a single piece."""
    return msgspec.structs.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        ids=tuple(token for piece in pieces for token in piece.ids),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        prompt_logprobs=pieces[0].prompt_logprobs,
    )


async def collect(ctx: AppContext, job: GenerationJob, receive: Receive) -> list[Piece] | None:
    """Runs a job to its end, one value a choice; None when the client went away before that."""
    pieces: list[list[Piece]] = [[] for _ in range(job.choices)]

    async def take(choice: int, piece: Piece) -> None:
        pieces[choice].append(piece)

    async with DisconnectWatch(receive) as hangup:
        await run(ctx, job, take)
    if hangup.gone:
        job.accounting.gone = True
        ctx.metrics.disconnects += 1
        return None
    return [merge(got) for got in pieces]


def prompt_fields(name: str, many: int) -> tuple[str, ...]:
    """Where each of `many` prompts stands in the body. Raises InvalidRequest for too many."""
    if many > MAX_CHOICES:
        raise InvalidRequest(name, f"holds {many} prompts: at most {MAX_CHOICES} in one request, send several")
    return (name,) if many == 1 else tuple(f"{name}[{i}]" for i in range(many))


def quota_of(request: Request) -> RequestQuota:
    """What the gate lets this request take."""
    found: RequestQuota = request.scope["quota"]
    return found


def salt_of(request: Request, text: str | None) -> int:
    """The number that stands for a cache salt: requests share cached prefixes only with the same one. 0 is no salt."""
    key = quota_of(request).api_key.salt_key
    if not text and not key:
        return 0
    salt = (text or "").encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(salt, digest_size=7, key=key).digest())


def clean_rid(text: str | None) -> str | None:
    """A request id as a client may choose it, or None: it goes into headers, logs and ids, so only plain characters,
    and few.
    """
    if text and len(text) <= MAX_RID and text.isascii() and all(c.isalnum() or c in "-_.:/" for c in text):
        return text
    return None
