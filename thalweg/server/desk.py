"""What every route works with, and the one way in which routes run requests on the front."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from thalweg.config.server import ServerOptions
from thalweg.core.errors import EngineDead, InvalidRequest
from thalweg.core.grammar import FREE, Grammar
from thalweg.core.plan import TokenLogprob
from thalweg.core.sampling import SamplingParams
from thalweg.server.contract import Front, Piece
from thalweg.server.errors import ApiError, Problem
from thalweg.server.examiner import Examiner
from thalweg.server.metrics import Meters, Timer
from thalweg.server.reading import named
from thalweg.server.responses.shelf import Shelf
from thalweg.server.stream import Hangup
from thalweg.text.chat import Chat

LONG_TEXT = 8192  # characters from which a text is tokenized on a thread: running streams must not wait for it
MAX_RID = 128
MAX_CHOICES = 16384  # of one HTTP request: prompts × n

Take = Callable[[int, Piece], Awaitable[None]]
_encode = msgspec.json.Encoder().encode


def reply(value: object, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type="application/json")


def gone() -> Response:
    """The answer that nobody reads, since the client has left (nginx's status for that)."""
    return Response(status_code=499)


@dataclass(frozen=True, slots=True, eq=False)
class Desk:
    """names: of the model, the first one shown. path: of its checkpoint, as the user gave it. defaults: what requests that do not say
    get. started: time.time(). shelf: the responses that are kept."""

    front: Front
    chat: Chat
    options: ServerOptions
    names: tuple[str, ...]
    path: str
    defaults: SamplingParams
    meters: Meters
    started: float
    shelf: Shelf
    examiner: Examiner = field(default_factory=Examiner)

    def model(self, asked: str | None) -> str:
        """The name to answer with. No name, "" and "default" are the model that is served; an unknown name is a 404."""
        if not asked or asked == "default":
            return self.names[0]
        if asked not in self.names:
            message = f"model {asked!r} does not exist here; this server has {', '.join(self.names)}"
            raise ApiError(Problem(404, message, "not_found_error", "model", "model_not_found"))
        return asked

    def rid(self, asked: str | None, request: Request) -> str:
        """The id of a request: the body's own, or else the one that its header brought or the server made. Raises InvalidRequest."""
        if asked is None:
            return str(request.scope["request_id"])
        if clean_rid(asked) is None:
            raise InvalidRequest("rid", f"must be 1 to {MAX_RID} letters, digits and -_.:/ characters")
        return asked

    async def prompt(self, text: str, field: str) -> list[int]:
        """Token ids of a prompt. Raises InvalidRequest, for an empty one too: a lone BOS is not what its sender meant."""
        if not text:
            raise InvalidRequest(field, "is empty: give at least one character")
        return await self.tokens(text, True, field)

    async def tokens(self, text: str, add_special: bool, field: str) -> list[int]:
        """Token ids of a text. Raises InvalidRequest when it cannot be written as UTF-8."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(field, "holds half a surrogate pair: not valid Unicode") from None
        encode = self.front.tokenizer.encode
        if len(text) < LONG_TEXT:
            await asyncio.sleep(0)  # a body may hold many of them: between two, others have their turn
            return encode(text, add_special)
        return await asyncio.to_thread(encode, text, add_special)


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the front: prompts (token ids), each with its parameters, its id and the field it stands in.

    Choice numbers run through all of them: those of prompt i begin at the sum of n before it.
    """

    prompts: tuple[Sequence[int], ...]
    params: tuple[SamplingParams, ...]
    rids: tuple[str, ...]
    fields: tuple[str, ...]
    priority: int
    salt: int
    started: float
    grammars: tuple[Grammar, ...] = ()

    def grammar(self, prompt: int) -> Grammar:
        """What the outputs of a prompt must match."""
        return self.grammars[prompt] if self.grammars else FREE

    @property
    def firsts(self) -> list[int]:
        """The number of each prompt's first choice, and behind them that of all choices."""
        return list(accumulate((params.n for params in self.params), initial=0))

    @property
    def choices(self) -> int:
        return self.firsts[-1]


def check(desk: Desk, job: Job) -> None:
    """Refuses before anything is streamed. Raises InvalidRequest, Overloaded, EngineDead (while the server drains, too)."""
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


async def run(desk: Desk, job: Job, take: Take) -> None:
    """Runs all prompts of a job at once; `take(choice, piece)` gets every piece. Cancelling it aborts what still runs."""
    timer = Timer(desk.meters, job.started)
    if len(job.prompts) == 1:
        return await _run(desk, job, 0, 0, timer, take)
    try:
        async with asyncio.TaskGroup() as group:
            for i, first in enumerate(job.firsts[:-1]):
                group.create_task(_run(desk, job, i, first, timer, take))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _run(desk: Desk, job: Job, i: int, first: int, timer: Timer, take: Take) -> None:
    """first: the number of the first choice of prompt i."""
    params = job.params[i]
    pieces = desk.front.stream(
        job.prompts[i],
        params,
        request_id=job.rids[i],
        priority=job.priority,
        salt=job.salt,
        grammar=job.grammar(i),
    )
    async with aclosing(pieces):
        async for piece in pieces:
            choice = first + piece.index
            timer.piece(choice, len(piece.ids), time.time())
            await take(choice, piece)
            if piece.finish is not None:
                timer.ended(piece.prompt_tokens, piece.cached_tokens, time.time())


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
    )


async def collect(desk: Desk, job: Job, receive: Receive) -> list[Merged] | None:
    """Runs a job to its end, one value a choice; None when the client went away before that."""
    pieces: list[list[Piece]] = [[] for _ in range(job.choices)]

    async def take(choice: int, piece: Piece) -> None:
        pieces[choice].append(piece)

    async with Hangup(receive) as hangup:
        await run(desk, job, take)
    if hangup.gone:
        desk.meters.disconnects += 1
        return None
    return [merge(got) for got in pieces]


def prompt_fields(name: str, many: int) -> tuple[str, ...]:
    """Where each of `many` prompts stands in the body. Raises InvalidRequest for too many."""
    if many > MAX_CHOICES:
        raise InvalidRequest(name, f"holds {many} prompts: at most {MAX_CHOICES} in one request, send several")
    return (name,) if many == 1 else tuple(f"{name}[{i}]" for i in range(many))


def salt_of(text: str | None) -> int:
    """The number that stands for a cache salt: requests share cached prefixes only with the same one. 0 is no salt."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=7).digest()) if text else 0


def clean_rid(text: str | None) -> str | None:
    """A request id as a client may choose it, or None: it goes into headers, logs and ids, so only plain characters, and few."""
    if text and len(text) <= MAX_RID and text.isascii() and all(c.isalnum() or c in "-_.:/" for c in text):
        return text
    return None
