"""Answers to an evaluation's questions, from an engine in this process or from a server over HTTP, with the same token
ids.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import closing

import msgspec
from torch import nn

from thalweg.attention.selection import Selection
from thalweg.bench.backends import RequestOptions, make_backend
from thalweg.bench.datasets import Prompt
from thalweg.bench.display import progress_bar
from thalweg.bench.errors import BenchError, HttpError
from thalweg.bench.eval_prompts import Continuation, EvalAnswer, EvalPrompt
from thalweg.bench.http_client import HttpClient, HttpReply
from thalweg.bench.in_process import Generation, generate
from thalweg.bench.load import ServerLoad, interruptible
from thalweg.bench.metrics import Record, failures
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.request import check_request
from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Assembler, Piece
from thalweg.layers.indexer import Indexer
from thalweg.llm import LLM

GREEDY = 0.0
SCORE_PROMPT = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=GREEDY)
ONE_TOKEN = {"max_tokens": 1, "temperature": GREEDY, "stream": False}  # other servers refuse no token at all


class NoAnswer(BenchError):
    """The server failed on a request. A missing answer is not a wrong one, so the task ends there."""


class EngineAnswerer:
    """An engine in this process."""

    def __init__(self, llm: LLM, progress: bool) -> None:
        self.llm, self.progress = llm, progress

    def answer(self, prompts: Sequence[EvalPrompt], label: str, into: dict[int, EvalAnswer]) -> None:
        """Raises InvalidRequest for a prompt that is too long."""
        requests = [
            Generation(ids, SamplingParams(temperature=GREEDY, max_tokens=limit, skip_special_tokens=False))
            for ids, limit in prompts
        ]
        for place, pieces in self._results(requests, label):
            text, ids = "".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.ids]
            into[place] = EvalAnswer(text, tuple(ids))

    def likelihoods(self, texts: Sequence[Continuation], label: str, into: dict[int, float]) -> None:
        """Raises InvalidRequest for a text that is too long."""
        for place, pieces in self._results([Generation(text.ids, SCORE_PROMPT) for text in texts], label):
            entries = next(piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs)
            into[place] = math.fsum(entry.logprob for entry in entries[texts[place].at - 1 :])

    def _results(self, requests: Sequence[Generation], label: str) -> Iterator[tuple[int, list[Piece]]]:
        """(place, pieces) of each request as it ends."""
        engine, tokenizer = self.llm.engine, self.llm.texts.tokenizer
        assemblers, pieces = dict[int, Assembler](), dict[int, list[Piece]]()
        places = {id(request): place for place, request in enumerate(requests)}
        for place, request in enumerate(requests):
            ids = tuple(request.prompt)
            check_request(ids, request.params, engine.context, engine.vocab)
            assemblers[place], pieces[place] = Assembler(0, ids, request.params, tokenizer), []
        with progress_bar(label, len(requests), self.progress) as bar, closing(generate(engine, requests)) as steps:
            for request, delta in (news for step in steps for news in step.news):
                place = places[id(request)]
                pieces[place].append(assemblers[place].feed(delta, 0.0))
                if delta.finish:
                    bar.advance()
                    yield place, pieces[place]

    def indexers(self) -> list[Indexer]:
        """Those of the model; empty where it selects no context."""
        model = self.llm.engine.runner.model
        modules = model.modules() if isinstance(model, nn.Module) else ()
        return [module for module in modules if isinstance(module, Indexer)]

    def has_nextn(self) -> bool:
        return self.llm.engine.runner.model.facts.nextn > 0

    def select(self, selection: Selection) -> None:
        """Replaces the indexers' selection of context, and empties the prefix cache. Raises UnsupportedConfig for a
        model that selects no context.
        """
        indexers = self.indexers()
        if not indexers:
            raise UnsupportedConfig("this model has no indexer, so there is no selection of context to replace")
        for indexer in indexers:
            indexer.selection = selection
        self.llm.engine.runner.eager()
        self.llm.engine.flush_cache()


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: tuple[_Choice]


class ServerAnswerer:
    """A server's `/v1/completions`, with token ids."""

    def __init__(self, base_url: str, model: str, api_key: str, concurrency: int, progress: bool = True) -> None:
        self.base_url, self.concurrency, self.progress = base_url, concurrency, progress
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.options = RequestOptions(model, GREEDY, ignore_eos=False, extra={"skip_special_tokens": False})

    def answer(self, prompts: Sequence[EvalPrompt], label: str, into: dict[int, EvalAnswer]) -> None:
        """Raises NoAnswer as soon as a request fails, KeyboardInterrupt on Ctrl-C."""
        asyncio.run(self._answer(prompts, label, into))

    async def _answer(self, prompts: Sequence[EvalPrompt], label: str, into: dict[int, EvalAnswer]) -> None:
        client, stop = HttpClient(self.base_url, self.headers), asyncio.Event()
        requests = [Prompt(limit, ids=ids, input_len=len(ids)) for ids, limit in prompts]
        load = ServerLoad(client, make_backend("openai"), self.options, requests)
        with progress_bar(label, len(prompts), self.progress) as bar, interruptible(stop):

            def on_done(record: Record) -> None:
                bar.advance()
                if record.error:
                    stop.set()

            await load.run([0.0] * len(prompts), self.concurrency, stop, on_done)
        client.close()
        into.update((place, EvalAnswer(record.text)) for place, record in enumerate(load.records) if record.ok)
        if failed := failures(load.records):
            reason = next(iter(failed))
            raise NoAnswer(f"{len(into)} of {len(prompts)} requests of {label} were answered, then: {reason}")
        if stop.is_set():
            raise KeyboardInterrupt

    def likelihoods(self, texts: Sequence[Continuation], label: str, into: dict[int, float]) -> None:
        """Raises NoAnswer when a request fails, or the server gives no log-probabilities of the prompt."""
        asyncio.run(self._likelihoods(texts, label, into))

    async def _likelihoods(self, texts: Sequence[Continuation], label: str, into: dict[int, float]) -> None:
        client, free = HttpClient(self.base_url, self.headers), asyncio.Semaphore(self.concurrency)
        with progress_bar(label, len(texts), self.progress) as bar:

            async def score(place: int, text: Continuation) -> None:
                body = {"model": self.options.model, "prompt": text.ids, "echo": True, "logprobs": 0, **ONE_TOKEN}
                async with free:
                    try:
                        reply = await client.request("POST", "/v1/completions", msgspec.json.encode(body))
                    except HttpError as error:
                        raise NoAnswer(f"a request of {label} failed: {error}") from error
                bar.advance()
                into[place] = _log_probability(reply, text, label)

            try:
                await asyncio.gather(*(score(place, text) for place, text in enumerate(texts)))
            finally:
                client.close()


def _log_probability(reply: HttpReply, text: Continuation, label: str) -> float:
    if reply.status != 200:
        raise NoAnswer(f"a request of {label} failed: HTTP {reply.status} {reply.reason}: {reply.text[:200]}")
    try:
        (choice,) = msgspec.json.decode(reply.body, type=_Completion).choices
    except msgspec.DecodeError as error:
        raise NoAnswer(f"an answer of {label} is not a completion: {error}") from error
    logged = [] if choice.logprobs is None else choice.logprobs.token_logprobs[text.at : len(text.ids)]
    nats = [value for value in logged if value is not None]
    if len(nats) != len(text.ids) - text.at:
        raise NoAnswer(
            f"{label}: the server gives no log-probabilities of the prompt (echo with logprobs); leave --base-url out"
        )
    return math.fsum(nats)
