"""Offline use from Python: `LLM` runs an engine in this thread, `AsyncLLM` one in a process of its own.

llm = LLM("models/tiny")
for result in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(result.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from rich.progress import Progress

from thalweg.config.tree import options_of
from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.messages import DumpExperts, StartProfile, StopProfile, UpdateWeights
from thalweg.core.plan import TokenLogprob
from thalweg.core.request import check_request
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams, typed_params
from thalweg.engine.build import BAR_COLUMNS
from thalweg.engine.client import EngineClient
from thalweg.engine.local import LocalEngine
from thalweg.engine.streams import Assembler, Piece
from thalweg.launch.resolve import resolve
from thalweg.text.grammar import check as check_grammar
from thalweg.text.retention import ThinkingRetention

T = TypeVar("T")
Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Conversations = Sequence[Message] | Sequence[Sequence[Message]]
ParamsOfEach = SamplingParams | Sequence[SamplingParams]
GrammarOfEach = Grammar | Sequence[Grammar]


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a result."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of `ids`, if requested
    finish: str | None = None  # "stop", "length", or "error" if the model computed NaN
    stop: str | int | None = None  # stop string or stop token id that ended it

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.finish, self.stop = piece.finish, piece.stop


@dataclass(slots=True)
class RequestOutput:
    """The n outputs of a prompt."""

    prompt_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of tokens 1 to the last, if requested
    cached_tokens: int = 0  # prompt tokens that were not computed
    warnings: tuple[str, ...] = ()  # parts of the grammar's schemas that are not enforced

    def add(self, piece: Piece) -> None:
        self.outputs[piece.index].add(piece)
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        if piece.prompt_logprobs and piece.index == 0:
            self.prompt_logprobs = list(piece.prompt_logprobs)


class _TextFrontend:
    """Tokenizer, chat encoder and resolved settings of both classes."""

    def __init__(self, model: str, config: Mapping[str, Any], progress: bool) -> None:
        self.resolved = resolve(options_of(model=model, **config), progress=progress)
        self.tokenizer, self.format = self.resolved.reader(), self.resolved.chat
        self.retention = ThinkingRetention(self.format, self.tokenizer.mark_id)

    def ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Raises InvalidRequest for ids that are no integers."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        try:
            return tuple(map(operator.index, prompt))
        except TypeError as error:
            raise InvalidRequest("prompt", f"must be a text or a list of token ids: {error}") from None

    def chat_ids(self, messages: Sequence[Message], **kwargs: Any) -> tuple[tuple[int, ...], CacheRetention]:
        """The prompt of a conversation, and the retention of its answer in the prefix cache."""
        if kwargs.get("tools") and (why := self.format.no_tools):
            raise InvalidRequest("tools", why)
        prompt = self.format.encoder.encode(messages, **kwargs)
        arguments = dict(kwargs.get("template_kwargs") or {})
        if (thinking := kwargs.get("thinking")) is not None:
            arguments["thinking"] = thinking
        return tuple(self.tokenizer.encode(prompt)), self.retention.keep(prompt, arguments, bool(kwargs.get("tools")))


class LLM:
    """An engine in the calling thread. config: the flags of `thalweg serve`, by name."""

    def __init__(self, model: str, *, progress: bool = False, **config: Any) -> None:
        self.texts = _TextFrontend(model, config, progress)
        self.engine = LocalEngine(self.texts.resolved.engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: ParamsOfEach = SamplingParams(),
        progress: bool = False,
        grammar: GrammarOfEach = NO_GRAMMAR,
        keep: CacheRetention | Sequence[CacheRetention] = RETAIN_ALL,
    ) -> list[RequestOutput]:
        """Completes each prompt (text or token ids). grammar: constraint on the output, e.g. `Grammar("json_object")`.
        keep: retention in the prefix cache. Raises InvalidRequest before anything runs.
        """
        many: list[Prompt] = _as_list(prompts, int)
        each = [typed_params(one) for one in _each(params, SamplingParams, "params", len(many))]
        grammars = _each(grammar, Grammar, "grammar", len(many))
        keeps = _each(keep, CacheRetention, "keep", len(many))
        requests = list(zip([self.texts.ids(prompt) for prompt in many], each, grammars, keeps, strict=True))
        for ids, p, g, _ in requests:
            check_request(ids, p, self.engine.context, self.engine.vocab, g)
        unenforced = {g: check_grammar(g) for g in set(grammars) - {NO_GRAMMAR}}
        results = self._run(requests, progress)
        for result, g in zip(results, grammars, strict=True):
            result.warnings = unenforced.get(g, ())
        return results

    def chat(
        self,
        conversations: Conversations,
        params: ParamsOfEach = SamplingParams(),
        progress: bool = False,
        grammar: GrammarOfEach = NO_GRAMMAR,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers each conversation (OpenAI messages). template: for the chat encoder, e.g. thinking=True."""
        prepared = [self.texts.chat_ids(messages, **template) for messages in _as_list(conversations, Mapping)]
        return self.generate([ids for ids, _ in prepared], params, progress, grammar, [keep for _, keep in prepared])

    def score(
        self, prompts: Prompt | Sequence[Prompt], top: int = 0, progress: bool = False
    ) -> list[list[TokenLogprob]]:
        """Log-probabilities of each prompt's tokens 1 to the last."""
        return [result.prompt_logprobs for result in self.generate(prompts, _scoring(top), progress)]

    def update_weights_from_disk(self, path: str, flush_cache: bool = True) -> str:
        """Replaces the tensors that the folder's checkpoint has. Returns a message with their number. flush_cache: also
        empties the prefix cache. Raises InvalidRequest, without any change, for a folder that does not fit.
        """
        return self.engine.control(UpdateWeights(0, path, flush_cache))

    def start_profile(self, folder: str, steps: int = 0, shapes: bool = False, stacks: bool = False) -> str:
        """Profiles for so many steps, or until `stop_profile`. Raises InvalidRequest if a profile runs."""
        return self.engine.control(StartProfile(0, folder, steps, shapes=shapes, stacks=stacks))

    def stop_profile(self) -> str:
        """Writes the Chrome trace. Returns its path. Raises InvalidRequest if no profile runs."""
        return self.engine.control(StopProfile(0))

    def dump_expert_distribution(self, folder: str) -> str:
        """Writes where experts are and how many tokens chose each, as `init_expert_location` reads it. Returns the
        file's path. Raises InvalidRequest without `enable_eplb`.
        """
        return self.engine.control(DumpExperts(0, folder))

    def close(self) -> None:
        """Ends the processes beside this one (`tp_size`, `dp_size`). Python does it at its exit, too."""
        self.engine.close()

    def _run(
        self, requests: Sequence[tuple[tuple[int, ...], SamplingParams, Grammar, CacheRetention]], progress: bool
    ) -> list[RequestOutput]:
        """Runs the engine until all requests have ended. Raises InvalidRequest for those that it refuses."""
        results: list[RequestOutput] = []
        owners: dict[int, tuple[RequestOutput, Assembler]] = {}
        for ids, p, grammar, keep in requests:
            results.append(RequestOutput(ids, [CompletionOutput() for _ in range(p.n)]))
            for index, uid in enumerate(self.engine.submit(ids, p, grammar=grammar, retention=keep)):
                owners[uid] = results[-1], Assembler(index, ids, p, self.texts.tokenizer)
        try:
            with Progress(*BAR_COLUMNS, disable=not progress) as bar:
                task = bar.add_task("sequences", total=len(owners))
                while owners:
                    for delta in self.engine.step():
                        if (owner := owners.get(delta.uid)) is None:
                            continue  # tokens after a stop string
                        result, assembler = owner
                        result.add(assembler.feed(delta, 0.0))
                        if assembler.ended:
                            del owners[delta.uid]
                            bar.advance(task)
                            if not delta.finish:
                                self.engine.abort((delta.uid,))
        finally:
            self.engine.abort(tuple(owners))  # those left by an error or Ctrl-C end at the next step
        while not self.engine.idle:
            self.engine.step()
        return results


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
        """The pieces of one request as they come."""
        return self.front.stream(self.texts.ids(prompt), typed_params(params), grammar=grammar, retention=keep)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),
        grammar: Grammar = NO_GRAMMAR,
        keep: CacheRetention = RETAIN_ALL,
    ) -> RequestOutput:
        """Completes one prompt; `generate_all` or asyncio.gather batch several."""
        ids = await asyncio.to_thread(self.texts.ids, prompt)
        warnings = await asyncio.to_thread(check_grammar, grammar) if grammar.is_set else ()
        result = RequestOutput(ids, [CompletionOutput() for _ in range(params.n)], warnings=warnings)
        async for piece in self.stream(ids, params, grammar, keep):
            result.add(piece)
        return result

    async def generate_all(
        self, prompts: Sequence[Prompt], params: SamplingParams = SamplingParams(), progress: bool = False
    ) -> list[RequestOutput]:
        """Completes all prompts at once. The first error ends the others."""
        with Progress(*BAR_COLUMNS, disable=not progress) as bar:
            shown = bar.add_task("prompts", total=len(prompts))
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self.generate(prompt, params)) for prompt in prompts]
                for task in running:
                    task.add_done_callback(lambda _: bar.advance(shown))
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
        return (await self.generate(prompt, _scoring(top))).prompt_logprobs

    async def update_weights_from_disk(self, path: str, flush_cache: bool = True) -> str:
        """As `LLM.update_weights_from_disk`; running requests continue with the new weights."""
        return await self.front.control(UpdateWeights(0, path, flush_cache))

    async def start_profile(self, folder: str, steps: int = 0, shapes: bool = False, stacks: bool = False) -> str:
        """As `LLM.start_profile`."""
        return await self.front.control(StartProfile(0, folder, steps, shapes=shapes, stacks=stacks))

    async def stop_profile(self) -> str:
        """As `LLM.stop_profile`."""
        return await self.front.control(StopProfile(0))

    async def dump_expert_distribution(self, folder: str) -> str:
        """As `LLM.dump_expert_distribution`."""
        return await self.front.control(DumpExperts(0, folder))


def _scoring(top: int) -> SamplingParams:
    return SamplingParams(max_tokens=0, prompt_logprobs=top, temperature=0.0)


def _each(value: T | Sequence[T], kind: type[T], name: str, count: int) -> list[T]:
    """One value for each prompt."""
    values = [value] * count if isinstance(value, kind) else list(cast(Sequence[T], value))
    if len(values) != count:
        raise InvalidRequest(name, f"{len(values)} given for {count} prompts")
    return values


def _as_list(values: Any, item: type) -> list[Any]:
    """A text, or a sequence of items (token ids, messages), is a list of one."""
    is_single = isinstance(values, str) or any(isinstance(value, item) for value in values)
    return [values] if is_single else list(values)
