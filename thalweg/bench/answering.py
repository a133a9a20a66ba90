"""Prompts of an evaluation in the checkpoint's chat format, and their answers: from an engine in this process, or from
a server over HTTP with the same token ids.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn

from thalweg.attention.selection import Selection
from thalweg.bench.backends import BACKENDS, RequestOptions
from thalweg.bench.datasets import SampleRequest
from thalweg.bench.display import progress_bar
from thalweg.bench.errors import BenchError
from thalweg.bench.eval_files import ChoiceQuestion
from thalweg.bench.http_client import HttpClient
from thalweg.bench.in_process import Generation, check_one_process, detokenized
from thalweg.bench.load_driver import LoadRun, interruptible
from thalweg.bench.metrics import Record, failures
from thalweg.bench.statistics import common_length
from thalweg.bench.tasks import Item
from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Piece
from thalweg.layers.mla import Indexer
from thalweg.llm import LLM
from thalweg.text.chat import ChatEncoder, ChatOptions, choose_chat
from thalweg.text.tokenizer import Tokenizer

GREEDY = 0.0
SCORE_PROMPT = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=GREEDY)


class EvalPrompt(NamedTuple):
    """A question."""

    ids: tuple[int, ...]
    limit: int  # most tokens of the answer


class Continuation(NamedTuple):
    """A prompt and a text that follows it."""

    ids: tuple[int, ...]
    at: int  # where the continuation begins, at least 1


class PromptFormat:
    """Makes prompts in the checkpoint's chat format."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        options = ChatOptions(special_tokens=self.tokenizer.special_tokens)
        self.encoder: ChatEncoder = choose_chat(folder, config, options).encoder

    def prompt(self, item: Item) -> EvalPrompt:
        """Raises InvalidRequest where the checkpoint has no chat format."""
        tools, schema = list(item.tools) or None, item.response_format
        text = self.encoder.encode(item.messages, tools, thinking=item.thinking, response_format=schema)
        return EvalPrompt(tuple(self.tokenizer.encode(text)), item.max_new_tokens)

    def with_target(self, item: Item) -> Continuation:
        """The prompt with its right answer and the end token."""
        prompt, target = self.prompt(item).ids, self.tokenizer.encode(item.target, add_special=False)
        return Continuation((*prompt, *target, self.tokenizer.eos_ids[0]), len(prompt))


class Answerer(Protocol):
    """Answers greedily, and scores continuations. Results come with their place as soon as they are known."""

    def answer(self, prompts: Sequence[EvalPrompt], label: str) -> Iterator[tuple[int, str]]:
        """Texts, with special tokens and without the end token."""

    def likelihoods(self, texts: Sequence[Continuation], label: str) -> Iterator[tuple[int, float]]:
        """The log-probability of each continuation, in nats."""


def continuations(question: ChoiceQuestion, texts: PromptFormat) -> list[Continuation]:
    """The prompt with each choice. A token that spans both counts with the choice."""
    encode = texts.tokenizer.encode
    if isinstance(question.prompt, str):
        before = encode(question.prompt)
        wholes = [encode(question.prompt + choice) for choice in question.choices]
    else:
        before = encode(texts.encoder.encode(question.prompt, None, thinking=False))
        wholes = [[*before, *encode(choice, add_special=False)] for choice in question.choices]
    return [Continuation(tuple(whole), max(common_length(before, whole), 1)) for whole in wholes]


class NoAnswer(BenchError):
    """The server failed on a request. A missing answer is not a wrong one, so the task ends there."""


class EngineAnswerer:
    """An engine in this process."""

    def __init__(self, llm: LLM, progress: bool) -> None:
        self.llm, self.progress = llm, progress

    def answer(self, prompts: Sequence[EvalPrompt], label: str) -> Iterator[tuple[int, str]]:
        """Raises InvalidRequest for a prompt that is too long, NumericalError where the model computes NaN."""
        requests = [
            Generation(ids, SamplingParams(temperature=GREEDY, max_tokens=limit, skip_special_tokens=False))
            for ids, limit in prompts
        ]
        for place, pieces in self._results(requests, label):
            yield place, "".join(piece.text for piece in pieces)

    def likelihoods(self, texts: Sequence[Continuation], label: str) -> Iterator[tuple[int, float]]:
        """Raises as `answer`."""
        for place, pieces in self._results([Generation(text.ids, SCORE_PROMPT) for text in texts], label):
            entries = next(piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs)
            yield place, math.fsum(entry.logprob for entry in entries[texts[place].at - 1 :])

    def _results(self, requests: Sequence[Generation], label: str) -> Iterator[tuple[int, list[Piece]]]:
        """(place, pieces) of each request as it ends."""
        places = {id(request): place for place, request in enumerate(requests)}
        pieces: list[list[Piece]] = [[] for _ in requests]
        with (
            progress_bar(label, len(requests), self.progress) as bar,
            closing(detokenized(self.llm, requests)) as results,
        ):
            for request, piece, _ in results:
                place = places[id(request)]
                pieces[place].append(piece)
                if piece.finish:
                    bar.advance()
                    yield place, pieces[place]

    def indexers(self) -> list[Indexer]:
        """Those of the model; empty where it selects no context."""
        model = self.llm.engine.runner.model
        modules = model.modules() if isinstance(model, nn.Module) else ()
        return [module for module in modules if isinstance(module, Indexer)]

    def select(self, selection: Selection) -> None:
        """Replaces the indexers' selection of context, and empties the prefix cache."""
        check_one_process(self.llm.engine, "a selection in place of the indexer's")
        for indexer in self.indexers():
            indexer.selection = selection
        self.llm.engine.runner.disable_graphs()
        self.llm.engine.flush_cache()


def _log_probability(record: Record, text: Continuation, label: str) -> float:
    nats = [value for value in record.logprobs[text.at : len(text.ids)] if value is not None]
    if len(nats) != len(text.ids) - text.at:
        raise NoAnswer(
            f"{label}: the server gives no log-probabilities of the prompt (echo with logprobs); leave --base-url out"
        )
    return math.fsum(nats)


class ServerAnswerer:
    """A server's `/v1/completions`, with token ids."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str,
        concurrency: int,
        progress: bool = True,
        run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run,
    ) -> None:
        self._run = run
        self.base_url, self.model, self.concurrency, self.progress = base_url, model, concurrency, progress
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def answer(self, prompts: Sequence[EvalPrompt], label: str) -> Iterator[tuple[int, str]]:
        """Raises NoAnswer as soon as a request fails, KeyboardInterrupt on Ctrl-C."""
        options = RequestOptions(self.model, GREEDY, ignore_eos=False, extra={"skip_special_tokens": False})
        requests = [SampleRequest(limit, ids=ids, input_len=len(ids)) for ids, limit in prompts]
        for place, record in self._answered(requests, options, label):
            yield place, record.text

    def likelihoods(self, texts: Sequence[Continuation], label: str) -> Iterator[tuple[int, float]]:
        """Raises NoAnswer when a request fails, or the server gives no log-probabilities of the prompt."""
        scoring = {"echo": True, "logprobs": 0}
        options = RequestOptions(self.model, GREEDY, ignore_eos=False, stream=False, extra=scoring)
        requests = [
            SampleRequest(1, ids=text.ids, input_len=len(text.ids)) for text in texts
        ]  # not every server takes 0
        for place, record in self._answered(requests, options, label):
            yield place, _log_probability(record, texts[place], label)

    def _answered(
        self, prompts: Sequence[SampleRequest], options: RequestOptions, label: str
    ) -> Iterator[tuple[int, Record]]:
        """(place, record) of each answer. Raises NoAnswer and KeyboardInterrupt after the last one."""
        records, stopped = self._run(self._send(prompts, options, label))
        good = [(place, record) for place, record in enumerate(records) if record.ok]
        yield from good
        for reason in failures(records):
            raise NoAnswer(f"{len(good)} of {len(prompts)} requests of {label} were answered, then: {reason}")
        if stopped:
            raise KeyboardInterrupt

    async def _send(
        self, prompts: Sequence[SampleRequest], options: RequestOptions, label: str
    ) -> tuple[list[Record], bool]:
        """The records, and whether a failure or Ctrl-C stopped the rest."""
        client, stop = HttpClient(self.base_url, self.headers), asyncio.Event()
        load = LoadRun(client, BACKENDS["openai"], options, prompts)
        with progress_bar(label, len(prompts), self.progress) as bar, interruptible(stop):

            def on_done(record: Record) -> None:
                bar.advance()
                if record.error:
                    stop.set()

            await load.run((), self.concurrency, stop, on_done)
        client.close()
        return load.records, stop.is_set()
