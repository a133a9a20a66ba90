"""Answers to an evaluation's questions, from an engine in this process or from a server over HTTP, with the same token
ids.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence, Sized
from contextlib import closing

from torch import nn

from thalweg.attention.selection import Selection
from thalweg.bench.backends import BACKENDS, RequestOptions
from thalweg.bench.datasets import Prompt
from thalweg.bench.display import progress_bar
from thalweg.bench.errors import BenchError
from thalweg.bench.eval_prompts import Continuation, EvalAnswer, EvalPrompt
from thalweg.bench.http_client import HttpClient
from thalweg.bench.in_process import Generation, generate
from thalweg.bench.load import ServerLoad, interruptible
from thalweg.bench.metrics import Record, failures
from thalweg.core.request import check_request
from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Assembler, Piece
from thalweg.layers.mla import Indexer
from thalweg.llm import LLM

GREEDY = 0.0
SCORE_PROMPT = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=GREEDY)


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

    def select(self, selection: Selection) -> None:
        """Replaces the indexers' selection of context, and empties the prefix cache."""
        for indexer in self.indexers():
            indexer.selection = selection
        self.llm.engine.runner.eager()
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

    def __init__(self, base_url: str, model: str, api_key: str, concurrency: int, progress: bool = True) -> None:
        self.base_url, self.model, self.concurrency, self.progress = base_url, model, concurrency, progress
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def answer(self, prompts: Sequence[EvalPrompt], label: str, into: dict[int, EvalAnswer]) -> None:
        """Raises NoAnswer as soon as a request fails, KeyboardInterrupt on Ctrl-C."""
        options = RequestOptions(self.model, GREEDY, ignore_eos=False, extra={"skip_special_tokens": False})
        requests = [Prompt(limit, ids=ids, input_len=len(ids)) for ids, limit in prompts]
        for place, record in self._answered(requests, options, label, into):
            into[place] = EvalAnswer(record.text)

    def likelihoods(self, texts: Sequence[Continuation], label: str, into: dict[int, float]) -> None:
        """Raises NoAnswer when a request fails, or the server gives no log-probabilities of the prompt."""
        scoring = {"echo": True, "logprobs": 0}
        options = RequestOptions(self.model, GREEDY, ignore_eos=False, stream=False, extra=scoring)
        requests = [Prompt(1, ids=text.ids, input_len=len(text.ids)) for text in texts]  # not every server takes 0
        for place, record in self._answered(requests, options, label, into):
            into[place] = _log_probability(record, texts[place], label)

    def _answered(
        self, prompts: Sequence[Prompt], options: RequestOptions, label: str, into: Sized
    ) -> Iterator[tuple[int, Record]]:
        """(place, record) of each answer. Raises NoAnswer and KeyboardInterrupt after the last one."""
        records, stopped = asyncio.run(self._send(prompts, options, label))
        yield from ((place, record) for place, record in enumerate(records) if record.ok)
        for reason in failures(records):
            raise NoAnswer(f"{len(into)} of {len(prompts)} requests of {label} were answered, then: {reason}")
        if stopped:
            raise KeyboardInterrupt

    async def _send(self, prompts: Sequence[Prompt], options: RequestOptions, label: str) -> tuple[list[Record], bool]:
        """The records, and whether a failure or Ctrl-C stopped the rest."""
        client, stop = HttpClient(self.base_url, self.headers), asyncio.Event()
        load = ServerLoad(client, BACKENDS["openai"], options, prompts)
        with progress_bar(label, len(prompts), self.progress) as bar, interruptible(stop):

            def on_done(record: Record) -> None:
                bar.advance()
                if record.error:
                    stop.set()

            await load.run([0.0] * len(prompts), self.concurrency, stop, on_done)
        client.close()
        return load.records, stop.is_set()
