"""A client with a scripted model, and a real HTTP server around it, for the server's tests."""

from __future__ import annotations

import asyncio
import codecs
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import uvicorn
from msgspec.structs import replace
from starlette.applications import Starlette

from thalweg.config.engine import EngineConfig
from thalweg.config.server import ServerOptions
from thalweg.core.errors import EngineDead, Overloaded
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.messages import Control, EngineReady, Stats
from thalweg.core.plan import PAGE, TokenLogprob
from thalweg.core.report import AUTO, Decision, Report
from thalweg.core.request import check_request
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.engine.client import PromptRequest
from thalweg.engine.streams import Piece
from thalweg.server.app import build
from thalweg.text.chat import ChatFormat, ParserNames, builtin

EOS, VOCAB, CONTEXT = 256, 262, 4096
FIM = {"<｜fim▁begin｜>": 257, "<｜fim▁hole｜>": 258, "<｜fim▁end｜>": 259}
MARKS = {**FIM, "<think>": 260, "</think>": 261}
DEEPSEEK_V32 = ChatFormat(builtin("deepseek-v32"), ParserNames("deepseek-v3", "deepseekv32"), "scripted")
Script = Callable[[str, int], str]  # prompt text, choice → what the model says


class ByteTokenizer:
    """Every byte is a token: characters of several bytes are tokens cut in the middle."""

    special_ids = frozenset({EOS})

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        end = "" if skip_special_tokens else "<eos>"
        return "".join(
            bytes(i for i in ids if i < EOS).decode(errors="replace") + end * (EOS in ids) for ids in [list(ids)]
        )

    def exceeds(self, text: str, limit: int) -> bool:
        return len(text.encode()) > limit

    def mark_id(self, text: str) -> int | None:
        return MARKS.get(text)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < EOS else b"<eos>"


def default_script(prompt: str, choice: int) -> str:
    return f"Answer {choice}: the prompt has {len(prompt)} characters. Grüße, 世界!"


class FakeFront:
    """The contract of `thalweg.engine.client.EngineClient` with `script` as the model. gap: seconds a token; chunk:
    tokens a piece.

    `live` holds what runs; `pages` what it occupies. `die()` ends the engine under running requests. full: the queue
    takes no more. refusal: what the engine says to a request that `check` let through.
    """

    def __init__(self, script: Script = default_script, gap: float = 0.0, chunk: int = 1) -> None:
        self.tokenizer, self.config = ByteTokenizer(), EngineConfig(model_path="tiny")
        self.state, self.reason = "ready", ""
        self.ready: EngineReady | None = EngineReady(
            1, CONTEXT, VOCAB, 100, 64, Report((Decision("attention_backend", "reference", AUTO, "cpu"),))
        )
        self.script, self.gap, self.chunk = script, gap, chunk
        self.full, self.flushed, self.weight_version, self.weights_lost = False, 0, "default", ""
        self.rank_states: dict[str, str] = {}
        self.of_ranks: dict[int, Stats] = {}
        self.pids = [self.ready.pid]
        self.controls: list[Control] = []
        self.refusal: Exception | None = None
        self.live: dict[object, str] = {}
        self.aborted: set[object] = set()
        self.ended: list[str] = []  # "done" or "closed", in order
        self.seen: list[tuple[list[int], SamplingParams, str, int, int]] = []
        self.grammars: list[Grammar] = []
        self.keeps: list[CacheRetention] = []
        self._pages: dict[object, int] = {}
        self._steps = self._prefill = self._decode = 0

    @property
    def running(self) -> int:
        return len(self.live)

    @property
    def pages(self) -> int:
        return sum(self._pages.values())

    @property
    def stats(self) -> Stats:
        return Stats(
            running=len(self.live),
            waiting=0,
            pages=100,
            pages_used=self.pages,
            pages_cached=7,
            steps=self._steps,
            prefill_tokens=self._prefill,
            decode_tokens=self._decode,
            prompt_tokens=self._prefill,
            verifications=10,
            drafted_tokens=20,
            accepted_tokens=12,
            drafted_at=(10, 10),
            accepted_at=(8, 4),
            wasted_drafts=3,
            steps_by_num_drafts=(5, 0, 10),
        )

    def die(self, reason: str) -> None:
        self.state, self.reason, self.ready = "dead", reason, None

    def check(self, prompt: Sequence[int], params: SamplingParams, grammar: Grammar = NO_GRAMMAR) -> None:
        if self.ready is None:
            raise EngineDead(self.reason)
        check_request(prompt, params, CONTEXT, VOCAB, grammar)

    def check_queue(self, sequences: int) -> None:
        if self.full:
            raise Overloaded("64 sequences run or wait, the limit is 64")

    async def stream_all(self, prompts: Sequence[PromptRequest]) -> AsyncGenerator[Piece, None]:
        """The pieces of all prompts as `stream` yields them."""
        arrived = asyncio.Queue[Piece | BaseException | None]()

        async def run(request: PromptRequest, first: int) -> None:
            prompt, params, request_id, options = request
            try:
                async with aclosing(self.stream(prompt, params, request_id=request_id, **options)) as pieces:
                    async for piece in pieces:
                        arrived.put_nowait(replace(piece, index=first + piece.index, is_sibling=piece.index > 0))
                arrived.put_nowait(None)
            except Exception as error:
                arrived.put_nowait(error)
                raise

        firsts = [sum(request.params.n for request in prompts[:i]) for i in range(len(prompts))]
        tasks = [asyncio.create_task(run(*each)) for each in zip(prompts, firsts, strict=True)]
        running = len(tasks)
        try:
            while running:
                piece = await arrived.get()
                if isinstance(piece, BaseException):
                    raise piece
                if piece is None:
                    running -= 1
                else:
                    yield piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        priority: int = 0,
        salt: int = 0,
        grammar: Grammar = NO_GRAMMAR,
        retention: CacheRetention = RETAIN_ALL,
    ) -> AsyncGenerator[Piece, None]:
        if self.refusal is not None:
            raise self.refusal
        key = object()
        self.seen.append((list(prompt), params, request_id, priority, salt))
        self.grammars.append(grammar)
        self.keeps.append(retention)
        self.live[key] = request_id
        self._pages[key] = len(prompt) // PAGE + 1
        self._prefill += len(prompt)
        text = self.tokenizer.decode(prompt)
        voices = [_Voice(self.tokenizer, params, i, prompt, self.script(text, i), self.chunk) for i in range(params.n)]
        try:
            while voices:
                await asyncio.sleep(self.gap)
                self._steps += 1
                if self.ready is None:
                    raise EngineDead(self.reason)
                for voice in list(voices):
                    piece = voice.step(key in self.aborted)
                    self._decode += len(piece.ids)
                    if piece.finish is not None:
                        voices.remove(voice)
                    yield piece
            self.ended.append("done")
        finally:
            if voices:
                self.ended.append("closed")
            del self.live[key], self._pages[key]

    async def abort(self, request_id: str) -> int:
        keys = [key for key, rid in self.live.items() if not request_id or rid == request_id]
        self.aborted.update(keys)
        return len(keys)

    async def flush_cache(self) -> None:
        if self.ready is None:
            raise EngineDead(self.reason)
        self.flushed += 1

    async def control(self, message: Control) -> str:
        if self.ready is None:
            raise EngineDead(self.reason)
        if self.refusal is not None:
            raise self.refusal
        self.controls.append(message)
        return "done"


class _Voice:
    """One choice: the script's text, token by token, cut at stop strings, stop ids and max_tokens."""

    def __init__(
        self, tokenizer: ByteTokenizer, params: SamplingParams, index: int, prompt: Sequence[int], text: str, chunk: int
    ):
        self.params, self.index, self.prompt, self.chunk = params, index, prompt, chunk
        self.stop: str | int | None = None
        for stop in params.stop:
            if stop in text:
                text, self.stop = text[: text.index(stop)] + stop * params.include_stop_str_in_output, stop
        self.tokens = tokenizer.encode(text)
        for at, token in enumerate(self.tokens):
            if token in params.stop_token_ids:
                self.tokens, self.stop = self.tokens[: at + 1], token
                break
        self.finish = "stop"
        if self.stop is None and not params.ignore_eos:
            self.tokens.append(EOS)
        limit = min(CONTEXT - len(prompt), CONTEXT if params.max_tokens is None else params.max_tokens)
        if params.ignore_eos:
            self.tokens = (self.tokens * (limit // len(self.tokens) + 1))[:limit]
        if len(self.tokens) > limit or params.ignore_eos:
            self.tokens, self.finish, self.stop = self.tokens[:limit], "length", None
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.at = 0

    def step(self, aborted: bool) -> Piece:
        ids = () if aborted else self.tokens[self.at : self.at + self.chunk]
        first = self.at == 0 and not aborted
        self.at += len(ids)
        finish = "abort" if aborted else self.finish if self.at >= len(self.tokens) else None
        shown = [i for i in ids if i < EOS and i != self.stop]
        want, scores = self.params.logprobs, self.params.prompt_logprobs
        return Piece(
            self.index,
            self.decoder.decode(bytes(shown), final=finish is not None),
            tuple(ids),
            () if want is None else tuple(logprob(token, want, self.params.logprob_token_ids) for token in ids),
            finish,
            self.stop if finish == "stop" else None,
            len(self.prompt),
            0 if self.index == 0 else len(self.prompt) - 1,
            self.at,
            () if scores is None or not first else tuple(logprob(token, scores) for token in self.prompt[1:]),
            time.time(),
        )


def logprob(token: int, top: int, listed: tuple[int, ...] = ()) -> TokenLogprob:
    """What the scripted model thinks of a token: a function of the token alone, the token itself being the most
    likely. listed: the others, in place of the next ones.
    """
    best = -0.5 - token / 1000
    others = listed or tuple((token + i) % EOS for i in range(top))
    return TokenLogprob(best, others, tuple(best - i for i in range(len(others))))


@contextmanager
def serving(app: Starlette, http: Any = "auto") -> Iterator[str]:
    """Serves the app over HTTP from a thread; gives its address. http: what speaks it, see uvicorn."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(app, http=http, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server ended before it began"
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


def fake_app(front: FakeFront, options: ServerOptions | None = None, chat: ChatFormat = DEEPSEEK_V32) -> Starlette:
    return build(front, options or ServerOptions(), chat, path="models/scripted")


def eventually(true: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
