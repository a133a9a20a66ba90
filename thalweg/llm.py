"""Offline use from Python: `LLM` runs an engine in this thread, `AsyncLLM` one in a process of its own.

llm = LLM("models/tiny")
for result in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(result.outputs[0].text)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thalweg.config.tree import options_of
from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.messages import StartProfile, StopProfile, UpdateWeights
from thalweg.core.plan import TokenLogprob
from thalweg.core.request import check_request
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.engine.client import EngineClient
from thalweg.engine.local import LocalEngine
from thalweg.engine.streams import Assembler, Piece
from thalweg.launch.resolve import resolve
from thalweg.text.grammar import check as check_grammar
from thalweg.text.retention import ThinkingRetention

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
COLUMNS = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a result. logprobs: one for each of ids, when asked. finish: "stop", "length", or "error" where
    the model computed no numbers (NaN), and there is no next token.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.finish, self.stop = piece.finish, piece.stop


@dataclass(slots=True)
class RequestOutput:
    """A prompt's n outputs. prompt_logprobs: of prompt tokens 1 to the last, when asked. cached_tokens: prompt tokens
    not computed.
    """

    prompt_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0

    def add(self, piece: Piece) -> None:
        self.outputs[piece.index].add(piece)
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        if piece.prompt_logprobs and piece.index == 0:
            self.prompt_logprobs = list(piece.prompt_logprobs)


class _TextFrontend:
    """What both faces share: the tokenizer, the chat encoder, and the resolved settings."""

    def __init__(self, model: str, config: Mapping[str, Any], progress: bool) -> None:
        self.resolved = resolve(options_of(model=model, **config), progress=progress)
        self.tokenizer, self.talk = self.resolved.reader(), self.resolved.chat
        self.history = ThinkingRetention(self.talk, self.tokenizer.mark_id)

    def ids(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)

    def chat_ids(self, messages: Sequence[Message], **kwargs: Any) -> tuple[tuple[int, ...], CacheRetention]:
        """The prompt of a conversation, and what of its answer the prefix cache keeps."""
        prompt = self.talk.encoder.encode(messages, **kwargs)
        thinking = {} if kwargs.get("thinking") is None else {"thinking": kwargs["thinking"]}
        arguments = {**(kwargs.get("template_kwargs") or {}), **thinking}
        return tuple(self.tokenizer.encode(prompt)), self.history.keep(prompt, arguments, bool(kwargs.get("tools")))


class LLM:
    """An engine in the calling thread. `config`: the fields of the command line's settings, by name (`thalweg serve
    --help`).
    """

    def __init__(self, model: str, *, progress: bool = False, **config: Any) -> None:
        self.texts = _TextFrontend(model, config, progress)
        self.engine = LocalEngine(self.texts.resolved.engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        progress: bool = False,
        grammar: Grammar | Sequence[Grammar] = NO_GRAMMAR,
        keep: CacheRetention | Sequence[CacheRetention] = RETAIN_ALL,
    ) -> list[RequestOutput]:
        """Completes each prompt (text or token ids). grammar: what the output must match, e.g.
        `Grammar("json_object")`. keep: what of prompt and output the prefix cache keeps.

        Raises InvalidRequest before anything runs if one cannot be served.
        """
        many = _many(prompts)
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        grammars = [grammar] * len(many) if isinstance(grammar, Grammar) else list(grammar)
        keeps = [keep] * len(many) if isinstance(keep, CacheRetention) else list(keep)
        for name, given in (("params", each), ("grammar", grammars), ("keep", keeps)):
            if len(given) != len(many):
                raise InvalidRequest(name, f"{len(given)} given for {len(many)} prompts")
        ids_of_each = [self.texts.ids(prompt) for prompt in many]
        requests = list(zip(ids_of_each, each, grammars, keeps, strict=True))
        for ids, p, g, _ in requests:
            check_request(ids, p, self.engine.context, self.engine.vocab, g)
        for g in set(grammars) - {NO_GRAMMAR}:
            check_grammar(g)
        return self._run(requests, progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        progress: bool = False,
        grammar: Grammar | Sequence[Grammar] = NO_GRAMMAR,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers each conversation (OpenAI messages); `template` goes to the chat encoder, e.g. tools=...,
        thinking=True.
        """
        asked = [self.texts.chat_ids(messages, **template) for messages in _conversations(conversations)]
        return self.generate([ids for ids, _ in asked], params, progress, grammar, [keep for _, keep in asked])

    def score(
        self, prompts: Prompt | Sequence[Prompt], top: int = 0, progress: bool = False
    ) -> list[list[TokenLogprob]]:
        """Log-probabilities of each prompt's tokens 1 to the last."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=top, temperature=0.0)
        return [result.prompt_logprobs for result in self.generate(prompts, params, progress)]

    def update_weights_from_disk(self, path: str, flush_cache: bool = True) -> str:
        """Replaces the tensors that the checkpoint in this folder has, all of them or a few; says how many.
        flush_cache: also forget what the old ones computed. Raises InvalidRequest for a folder that does not fit, and
        has changed nothing then.
        """
        return self.engine.control(UpdateWeights(0, path, flush_cache))

    def start_profile(self, folder: str, steps: int = 0, shapes: bool = False, stacks: bool = False) -> str:
        """Profiles what runs from here on, for so many steps or until `stop_profile`. Raises InvalidRequest where one
        runs already.
        """
        return self.engine.control(StartProfile(0, folder, steps, shapes=shapes, stacks=stacks))

    def stop_profile(self) -> str:
        """Writes the Chrome trace; its path. Raises InvalidRequest where none runs."""
        return self.engine.control(StopProfile(0))

    def _run(
        self, requests: Sequence[tuple[tuple[int, ...], SamplingParams, Grammar, CacheRetention]], progress: bool
    ) -> list[RequestOutput]:
        results = [RequestOutput(ids, [CompletionOutput() for _ in range(p.n)]) for ids, p, _, _ in requests]
        owners: dict[int, tuple[RequestOutput, Assembler]] = {}
        for (ids, p, grammar, keep), result in zip(requests, results, strict=True):
            for index, uid in enumerate(self.engine.submit(ids, p, grammar=grammar, retention=keep)):
                owners[uid] = result, Assembler(index, ids, p, self.texts.tokenizer)
        try:
            self._finish(owners, progress)
        finally:
            self.engine.abort(tuple(owners))  # whom an error or Ctrl-C has left behind: they end at the next turn
        while not self.engine.idle:
            self.engine.step()
        return results

    def _finish(self, owners: dict[int, tuple[RequestOutput, Assembler]], progress: bool) -> None:
        """Turns the engine until nobody is left. Raises InvalidRequest for what the engine refuses."""
        with Progress(*COLUMNS, disable=not progress) as bar:
            task = bar.add_task("sequences", total=len(owners))
            while owners:
                for delta in self.engine.step():
                    if (owner := owners.get(delta.uid)) is None:
                        continue  # beyond a stop string
                    result, assembler = owner
                    result.add(assembler.feed(delta, 0.0))
                    if assembler.ended:
                        del owners[delta.uid]
                        bar.advance(task)
                        if not delta.finish:
                            self.engine.abort((delta.uid,))


class AsyncLLM:
    """An engine in its own process, used from asyncio. `async with AsyncLLM(model) as llm: await llm.generate(...)`."""

    def __init__(self, model: str, *, progress: bool = False, **config: Any) -> None:
        self.texts = _TextFrontend(model, config, progress)
        self.front = EngineClient(self.texts.resolved.engine, self.texts.tokenizer)

    async def __aenter__(self) -> AsyncLLM:
        await self.front.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.front.close()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),
        grammar: Grammar = NO_GRAMMAR,
        keep: CacheRetention = RETAIN_ALL,
    ) -> AsyncIterator[Piece]:
        """The pieces of one request as they come. The engine refuses a grammar that cannot be compiled."""
        return self.front.stream(self.texts.ids(prompt), params, grammar=grammar, retention=keep)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),
        grammar: Grammar = NO_GRAMMAR,
        keep: CacheRetention = RETAIN_ALL,
    ) -> RequestOutput:
        """Completes one prompt; `generate_all` or asyncio.gather batch several."""
        ids = await asyncio.to_thread(self.texts.ids, prompt)
        result = RequestOutput(ids, [CompletionOutput() for _ in range(params.n)])
        async for piece in self.front.stream(ids, params, grammar=grammar, retention=keep):
            result.add(piece)
        return result

    async def generate_all(
        self, prompts: Sequence[Prompt], params: SamplingParams = SamplingParams(), progress: bool = False
    ) -> list[RequestOutput]:
        """Completes all prompts at once, with a progress bar if asked; the first error ends the others."""
        with Progress(*COLUMNS, disable=not progress) as bar:
            task = bar.add_task("prompts", total=len(prompts))

            async def one(prompt: Prompt) -> RequestOutput:
                result = await self.generate(prompt, params)
                bar.advance(task)
                return result

            async with asyncio.TaskGroup() as group:
                running = [group.create_task(one(prompt)) for prompt in prompts]
        return [done.result() for done in running]

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams = SamplingParams(),
        grammar: Grammar = NO_GRAMMAR,
        **template: Any,
    ) -> RequestOutput:
        """Answers one conversation."""
        ids, keep = self.texts.chat_ids(messages, **template)
        return await self.generate(ids, params, grammar, keep)

    async def score(self, prompt: Prompt, top: int = 0) -> list[TokenLogprob]:
        """Log-probabilities of the prompt's tokens 1 to the last."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=top, temperature=0.0)
        return (await self.generate(prompt, params)).prompt_logprobs

    async def update_weights_from_disk(self, path: str, flush_cache: bool = True) -> str:
        """As `LLM.update_weights_from_disk`; requests that run go on with the new weights."""
        return await self.front.control(UpdateWeights(0, path, flush_cache))

    async def start_profile(self, folder: str, steps: int = 0, shapes: bool = False, stacks: bool = False) -> str:
        """As `LLM.start_profile`."""
        return await self.front.control(StartProfile(0, folder, steps, shapes=shapes, stacks=stacks))

    async def stop_profile(self) -> str:
        """As `LLM.stop_profile`."""
        return await self.front.control(StopProfile(0))


def _many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, or a list of ids) is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [prompt for prompt in prompts if isinstance(prompt, int)]
    if ids:
        return [ids]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]


def _conversations(given: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation is a list of one."""
    messages = [message for message in given if isinstance(message, Mapping)]
    if messages:
        return [messages]
    return [messages for messages in given if not isinstance(messages, Mapping)]
