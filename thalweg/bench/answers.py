"""Who answers an evaluation's questions: an engine in this process, or a server over HTTP. Both get the same token
ids.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from rich.progress import Progress
from torch import nn

from thalweg.attention.selection import Selection
from thalweg.bench.backends import Options, make_backend
from thalweg.bench.client import Client, Reply
from thalweg.bench.datasets import Prompt
from thalweg.bench.errors import HttpError
from thalweg.bench.load import Load, interruptible
from thalweg.bench.metrics import Record, failures
from thalweg.bench.tasks import Item
from thalweg.core.errors import ThalwegError, UnsupportedConfig
from thalweg.core.request import check_request
from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Assembler
from thalweg.layers.indexer import Indexer
from thalweg.llm import COLUMNS, LLM, CompletionOutput, RequestOutput
from thalweg.text.chat import ChatEncoder, ChatOptions, choose_chat
from thalweg.text.tokenizer import Tokenizer

GREEDY = 0.0


class NoAnswer(ThalwegError):
    """The server failed on a request: what is missing is no wrong answer, so the task ends there."""


@dataclass(frozen=True, slots=True)
class Question:
    """ids: the prompt. limit: most tokens to write."""

    ids: tuple[int, ...]
    limit: int


class Texts:
    """Makes prompts as the checkpoint wants them."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        wish = ChatOptions(special_tokens=self.tokenizer.special_tokens)
        self.encoder: ChatEncoder = choose_chat(folder, config, wish).encoder

    def question(self, item: Item) -> Question:
        """Raises InvalidRequest where the checkpoint has no chat format."""
        text = self.encoder.encode(item.messages, list(item.tools) or None, thinking=item.thinking)
        return Question(tuple(self.tokenizer.encode(text)), item.max_new_tokens)

    def with_target(self, item: Item) -> tuple[tuple[int, ...], int]:
        """The prompt with its right answer and the end token behind it, and where the answer begins."""
        prompt = self.question(item).ids
        target = self.tokenizer.encode(item.target, add_special=False)
        return (*prompt, *target, self.tokenizer.eos_ids[0]), len(prompt)


@dataclass(frozen=True, slots=True)
class Answer:
    """text: special tokens included, the end token left out. ids: the end token included; empty over HTTP."""

    text: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Continued:
    """ids: a prompt and a continuation of it. at: where the continuation begins, at least 1."""

    ids: tuple[int, ...]
    at: int


class Answerer(Protocol):
    """Answers greedily, and weighs what might be answered. What is done goes into `into`, by its place among what was
    asked, as soon as it is: that is what stays when Ctrl-C or an error ends it.
    """

    def answer(self, questions: Sequence[Question], label: str, into: dict[int, Answer]) -> None: ...

    def likelihoods(self, asked: Sequence[Continued], label: str, into: dict[int, float]) -> None:
        """The log-probability of each continuation, in nats."""


class Here:
    """An engine in this process."""

    def __init__(self, llm: LLM, progress: bool) -> None:
        self.llm, self.progress = llm, progress

    def answer(self, questions: Sequence[Question], label: str, into: dict[int, Answer]) -> None:
        """Raises InvalidRequest for a prompt that is too long."""
        asked = [
            (one.ids, SamplingParams(temperature=GREEDY, max_tokens=one.limit, skip_special_tokens=False))
            for one in questions
        ]
        for place, result in self._results(asked, label):
            into[place] = Answer(result.outputs[0].text, tuple(result.outputs[0].ids))

    def likelihoods(self, asked: Sequence[Continued], label: str, into: dict[int, float]) -> None:
        """Raises InvalidRequest for a text that is too long."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=GREEDY)
        for place, result in self._results([(one.ids, params) for one in asked], label):
            into[place] = math.fsum(entry.logprob for entry in result.prompt_logprobs[asked[place].at - 1 :])

    def _results(
        self, asked: Sequence[tuple[tuple[int, ...], SamplingParams]], label: str
    ) -> Iterator[tuple[int, RequestOutput]]:
        """(place, result) of each request as it ends; all are queued at once."""
        engine, owners = self.llm.engine, dict[int, tuple[int, RequestOutput, Assembler]]()
        for ids, params in asked:
            check_request(ids, params, engine.context, engine.vocab)
        for place, (ids, params) in enumerate(asked):
            (uid,) = engine.submit(ids, params)
            assembler = Assembler(0, ids, params, self.llm.texts.tokenizer)
            owners[uid] = place, RequestOutput(ids, [CompletionOutput()]), assembler
        try:
            with Progress(*COLUMNS, disable=not self.progress) as bar:
                task = bar.add_task(label, total=len(owners))
                while owners:
                    for delta in engine.step():
                        if (owner := owners.get(delta.uid)) is None:
                            continue  # left behind by an earlier call that was broken off
                        place, result, assembler = owner
                        result.add(assembler.feed(delta, 0.0))
                        if assembler.ended:
                            del owners[delta.uid]
                            bar.advance(task)
                            yield place, result
        finally:
            engine.abort(tuple(owners))  # whom an error or Ctrl-C has left behind
        while not engine.idle:
            engine.step()

    def indexers(self) -> list[Indexer]:
        """Those of the model; empty where it chooses no context."""
        model = self.llm.engine.runner.model
        return (
            [module for module in model.modules() if isinstance(module, Indexer)]
            if isinstance(model, nn.Module)
            else []
        )

    def has_nextn(self) -> bool:
        model = self.llm.engine.runner.model
        return model.facts.nextn > 0

    def select(self, selection: Selection) -> None:
        """Puts another choice of context in the place of the indexer's, and forgets what was computed with the old one.

        Raises UnsupportedConfig for a model that chooses no context.
        """
        found = self.indexers()
        if not found:
            raise UnsupportedConfig("this model has no indexer, so there is no choice of context to replace")
        for indexer in found:
            indexer.selection = selection
        self.llm.engine.runner.eager()
        self.llm.engine.flush_cache()


class There:
    """A server's `/v1/completions`, with token ids."""

    def __init__(self, base_url: str, model: str, api_key: str, concurrency: int, progress: Progress) -> None:
        self.base_url, self.concurrency, self.progress = base_url, concurrency, progress
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        extra: dict[str, object] = {"skip_special_tokens": False}
        self.options = Options(model=model, temperature=GREEDY, ignore_eos=False, extra=extra)

    def answer(self, questions: Sequence[Question], label: str, into: dict[int, Answer]) -> None:
        """Raises NoAnswer as soon as a request fails, KeyboardInterrupt on Ctrl-C."""
        asyncio.run(self._answer(questions, label, into))

    async def _answer(self, questions: Sequence[Question], label: str, into: dict[int, Answer]) -> None:
        client, stop = Client(self.base_url, self.headers), asyncio.Event()
        prompts = [Prompt(question.limit, ids=question.ids, input_len=len(question.ids)) for question in questions]
        load = Load(client, make_backend("openai"), self.options, prompts)
        task = self.progress.add_task(label, total=len(questions))

        def on_done(record: Record) -> None:
            self.progress.advance(task)
            if record.error:
                stop.set()

        with interruptible(stop):
            await load.run([0.0] * len(prompts), self.concurrency, stop, on_done)
        client.close()
        into.update((place, Answer(record.text)) for place, record in enumerate(load.records) if record.ok)
        if wrong := failures(load.records):
            reason = next(iter(wrong))
            raise NoAnswer(f"{len(into)} of {len(questions)} requests of {label} were answered, then: {reason}")
        if stop.is_set():
            raise KeyboardInterrupt

    def likelihoods(self, asked: Sequence[Continued], label: str, into: dict[int, float]) -> None:
        """Raises NoAnswer when a request fails, or when the server gives no log-probabilities of the prompt."""
        asyncio.run(self._likelihoods(asked, label, into))

    async def _likelihoods(self, asked: Sequence[Continued], label: str, into: dict[int, float]) -> None:
        client, places = Client(self.base_url, self.headers), asyncio.Semaphore(self.concurrency)
        task = self.progress.add_task(label, total=len(asked))

        async def one(place: int, each: Continued) -> None:
            body = {"model": self.options.model, "prompt": each.ids, "echo": True, "logprobs": 0, **ONE_TOKEN}
            async with places:
                try:
                    reply = await client.request("POST", "/v1/completions", msgspec.json.encode(body))
                except HttpError as error:
                    raise NoAnswer(f"a request of {label} failed: {error}") from error
            self.progress.advance(task)
            into[place] = _sum_of(reply, each, label)

        try:
            await asyncio.gather(*(one(place, each) for place, each in enumerate(asked)))
        finally:
            client.close()


ONE_TOKEN = {"max_tokens": 1, "temperature": GREEDY, "stream": False}  # none at all is refused by other servers


class _Log(msgspec.Struct):
    token_logprobs: list[float | None]


class _Scored(msgspec.Struct):
    logprobs: _Log | None = None


class _Scores(msgspec.Struct):
    choices: list[_Scored]


def _sum_of(reply: Reply, each: Continued, label: str) -> float:
    if reply.status != 200:
        raise NoAnswer(f"a request of {label} failed: HTTP {reply.status} {reply.reason}: {reply.text[:200]}")
    try:
        (choice,) = msgspec.json.decode(reply.body, type=_Scores).choices
    except (msgspec.DecodeError, ValueError) as error:
        raise NoAnswer(f"an answer of {label} is no completion: {error}") from error
    logged = [] if choice.logprobs is None else choice.logprobs.token_logprobs[each.at : len(each.ids)]
    nats = [value for value in logged if value is not None]
    if len(nats) != len(each.ids) - each.at:
        raise NoAnswer(
            f"{label}: the server gives no log-probabilities of the prompt (echo with logprobs); leave --base-url out"
        )
    return math.fsum(nats)
