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
from thalweg.core.acceptance import AcceptanceCounts
from thalweg.core.errors import EngineDead, InvalidRequest, engine_unavailable
from thalweg.core.grammar import Grammar
from thalweg.core.plan import TokenLogprob
from thalweg.core.request import QueueReservation
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.server.account import Account
from thalweg.server.contract import Front, Piece, Tokenizer
from thalweg.server.errors import ApiError, Problem
from thalweg.server.examiner import Examiner
from thalweg.server.keyring import Allowance
from thalweg.server.logs import NoLog, Take
from thalweg.server.metrics import Meters, Timer
from thalweg.server.reading import named
from thalweg.server.responses.shelf import Shelf
from thalweg.server.sampling import given
from thalweg.server.stream import Hangup
from thalweg.text.chat import Chat
from thalweg.text.history import History

THREADS = 4  # for what takes long
LONG_TEXT = 8192  # characters from which a text is tokenized on a thread: running streams must not wait for it
MAX_RID = 128
MAX_CHOICES = 16384  # of one HTTP request: prompts × n
MAX_SCORES = 1 << 20  # log-probabilities of prompts in one answer: some 100 bytes of memory each

Listen = Callable[[Account, Take], Take]
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
class Desk:
    """names: of the model, the first one shown. path: of its checkpoint, as the user gave it. defaults: what requests
    that do not say get. started: time.time(). shelf: the responses that are kept. history: what the next turn of a
    conversation renders again.
    """

    front: Front
    chat: Chat
    options: ServerOptions
    names: tuple[str, ...]
    path: str
    defaults: SamplingParams
    meters: Meters
    started: float
    shelf: Shelf
    history: History
    examiner: Examiner = field(default_factory=Examiner)
    pool: Executor = field(default_factory=partial(ThreadPoolExecutor, THREADS, "desk"))
    listen: Listen = NoLog().listen

    def model(self, asked: str | None) -> str:
        """The name to answer with. No name, "" and "default" are the model that is served; an unknown name is a 404."""
        if not asked or asked == "default":
            return self.names[0]
        if asked not in self.names:
            message = f"model {asked!r} does not exist here; this server has {', '.join(self.names)}"
            raise ApiError(Problem(404, message, "not_found_error", "model", "model_not_found"))
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
class Job:
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
    allowance: Allowance
    account: Account
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


def check(desk: Desk, job: Job) -> None:
    """Refuses before anything is streamed. Raises InvalidRequest, Overloaded, EngineDead (while the server drains,
    too).
    """
    if desk.front.state == "draining":
        raise EngineDead(desk.front.reason)
    if not -(2**31) <= job.priority < 2**31:
        raise InvalidRequest("priority", f"must fit 32 bits, got {job.priority}")
    for i, (prompt, params, place) in enumerate(zip(job.prompts, job.params, job.fields, strict=True)):
        with named(prompt=place):
            desk.front.check(prompt, params)
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
    with desk.front.reserve(job.choices):
        pass  # now there is room: what streams has a status of its own only before it streams
    job.allowance.reserve(_most(desk, job))


def _most(desk: Desk, job: Job) -> int:
    """The tokens that a job can use at most: its prompts once each, and all outputs."""
    context = 0 if desk.front.ready is None else desk.front.ready.context
    return sum(
        len(prompt) + params.n * min(given(params.max_tokens, context), max(context - len(prompt), 0))
        for prompt, params in zip(job.prompts, job.params, strict=True)
    )


async def run(desk: Desk, job: Job, take: Take) -> None:
    """Runs all prompts of a job at once; `take(choice, piece)` gets every piece. Cancelling it aborts what still
    runs.
    """
    account, left = job.account, "error"
    account.model, account.rids = desk.names[0], job.rids
    timer = Timer(desk.meters, account)
    timer.submit(job.prompts, job.params, time.time())
    try:
        await _run_all(desk, job, timer, desk.listen(account, take))
    except asyncio.CancelledError:
        left = "abort"
        raise
    finally:
        timer.close(job.choices, left)


async def _run_all(desk: Desk, job: Job, timer: Timer, take: Take) -> None:
    if len(job.prompts) == 1:
        return await _run(desk, job, 0, 0, timer, take)
    try:
        with desk.front.reserve(job.choices) as room:  # all of them, or none
            async with asyncio.TaskGroup() as group:
                for i, first in enumerate(job.firsts[:-1]):
                    group.create_task(_run(desk, job, i, first, timer, take, room))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _run(
    desk: Desk, job: Job, i: int, first: int, timer: Timer, take: Take, room: QueueReservation | None = None
) -> None:
    """first: the number of the first choice of prompt i."""
    params = job.params[i]
    pieces = desk.front.stream(
        job.prompts[i],
        params,
        request_id=job.allowance.tenant.mark(job.rids[i]),
        priority=job.priority,
        salt=job.salt,
        grammar=job.grammar(i),
        retention=job.keep,
        reservation=room,
    )
    allowance = job.allowance
    allowance.used += len(job.prompts[i])
    async with aclosing(pieces):
        async for piece in pieces:
            choice = first + piece.index
            allowance.used += len(piece.ids)
            timer.piece(choice, piece, time.time())
            await take(choice, piece)
            if piece.finish is not None:
                timer.ended(choice, piece, time.time())


@dataclass(slots=True)
class Merged:
    """All pieces of one choice as one: an answer that is not streamed is a stream of a single piece."""

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
    admitted: float
    preempted: int
    drafted: AcceptanceCounts | None


def merge(pieces: Sequence[Piece]) -> Merged:
    last = pieces[-1]
    return Merged(
        last.index,
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.ids),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        last.finish,
        last.stop,
        last.prompt_tokens,
        last.cached_tokens,
        last.completion_tokens,
        pieces[0].prompt_logprobs,
        last.at,
        last.admitted,
        last.preempted,
        last.drafted,
    )


async def collect(desk: Desk, job: Job, receive: Receive) -> list[Merged] | None:
    """Runs a job to its end, one value a choice; None when the client went away before that."""
    pieces: list[list[Piece]] = [[] for _ in range(job.choices)]

    async def take(choice: int, piece: Piece) -> None:
        pieces[choice].append(piece)

    async with Hangup(receive) as hangup:
        await run(desk, job, take)
    if hangup.gone:
        job.account.gone = True
        desk.meters.disconnects += 1
        return None
    return [merge(got) for got in pieces]


def prompt_fields(name: str, many: int) -> tuple[str, ...]:
    """Where each of `many` prompts stands in the body. Raises InvalidRequest for too many."""
    if many > MAX_CHOICES:
        raise InvalidRequest(name, f"holds {many} prompts: at most {MAX_CHOICES} in one request, send several")
    return (name,) if many == 1 else tuple(f"{name}[{i}]" for i in range(many))


def allowance_of(request: Request) -> Allowance:
    """What the gate lets this request take."""
    found: Allowance = request.scope["allowance"]
    return found


def salt_of(request: Request, text: str | None) -> int:
    """The number that stands for a cache salt: requests share cached prefixes only with the same one. 0 is no salt."""
    key = allowance_of(request).tenant.salt_key
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
