"""An engine in a process of its own, used from asyncio."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, Self

from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.messages import Control, DumpExperts, StartProfile, StopProfile, UpdateWeights
from thalweg.core.sampling import RequestOutputKind, SamplingParams
from thalweg.engine.client import EngineClient
from thalweg.llm.llm import SCORING, prompt_scores
from thalweg.llm.outputs import OutputBuilder, RequestOutput
from thalweg.llm.prompts import (
    Message,
    Params,
    PreparedRequest,
    Prompt,
    TextFrontend,
    TokenizedPrompt,
)
from thalweg.llm.tokenizer import ChatTokenizer
from thalweg.text.chat import with_thinking


class _Stream(Protocol):
    def __call__(self, kind: RequestOutputKind | None) -> AsyncGenerator[RequestOutput, None]:
        """kind: None is that of the request."""


class OutputStream(AsyncIterator[RequestOutput]):
    """The outputs of a request, for `async for`; or `await` it for the last one alone. A stream that is closed or
    forgotten aborts its request.
    """

    def __init__(self, stream: _Stream) -> None:
        self._stream, self._outputs = stream, stream(None)

    async def __anext__(self) -> RequestOutput:
        return await anext(self._outputs)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._last().__await__()

    async def aclose(self) -> None:
        """Aborts the request if it runs."""
        await self._outputs.aclose()

    async def _last(self) -> RequestOutput:
        async with aclosing(self._stream(RequestOutputKind.FINAL_ONLY)) as outputs:
            return await anext(outputs)


class AsyncLLM:
    """An engine in its own process: `async with AsyncLLM("models/tiny") as llm: await llm.generate(…)`.

    Arguments are those of `LLM`. The engine starts with `async with`, or with the first request, and is used from one
    event loop.
    """

    def __init__(self, model: str | None = None, *, use_tqdm_on_load: bool = True, **config: Any) -> None:
        self.texts = TextFrontend(model, config, use_tqdm_on_load and sys.stderr.isatty())
        self.front = EngineClient(self.texts.resolved.engine, self.texts.tokenizer)
        self._starting, self._is_started = asyncio.Lock(), False
        self._ids = itertools.count()

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
        grammar: Grammar = NO_GRAMMAR,
    ) -> OutputStream:
        """Completes one prompt; see `LLM.generate` for the arguments. Requests run together.

        `async for output in llm.generate(…)` yields everything so far, each time; with `output_kind` of SamplingParams
        what is new, or the last output alone. `await llm.generate(…)` is the last output. request_id: for `abort`; ""
        makes one. Raises, at the first await, InvalidRequest, and EngineDead if the engine ends.
        """

        async def tokenize() -> TokenizedPrompt:
            return (await asyncio.to_thread(self.texts.tokenize, [prompt]))[0]

        return self._stream(tokenize, sampling_params, request_id, priority, grammar)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params | None = None,
        request_id: str = "",
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        priority: int = 0,
        grammar: Grammar = NO_GRAMMAR,
    ) -> OutputStream:
        """Answers one conversation; see `LLM.chat` for the arguments, `generate` for what it returns."""

        async def render() -> TokenizedPrompt:
            arguments = with_thinking(chat_template_kwargs, reasoning_effort, thinking)
            return self.texts.render(messages, tools, arguments, add_generation_prompt, continue_final_message)

        return self._stream(render, sampling_params, request_id, priority, grammar)

    async def score(self, prompt: Prompt) -> list[float]:
        """Log-probabilities of the prompt's tokens 1 to the last, in nats."""
        return prompt_scores(await self.generate(prompt, SCORING))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends the requests with this id, or these; their last output has the finish reason "abort"."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            if each:
                await self.front.abort(each)

    def get_tokenizer(self) -> ChatTokenizer:
        """As `LLM.get_tokenizer`."""
        return ChatTokenizer(self.texts)

    def get_default_sampling_params(self) -> SamplingParams:
        """As `LLM.get_default_sampling_params`."""
        return self.texts.resolved.sampling.clone()

    async def update_weights_from_disk(self, model_path: str, flush_cache: bool = True) -> str:
        """As `LLM.update_weights_from_disk`; running requests continue with the new weights."""
        return await self._control(UpdateWeights(0, model_path, flush_cache))

    async def start_profile(self, folder: str, steps: int = 0, shapes: bool = False, stacks: bool = False) -> str:
        """As `LLM.start_profile`."""
        return await self._control(StartProfile(0, folder, steps, shapes=shapes, stacks=stacks))

    async def stop_profile(self) -> str:
        """As `LLM.stop_profile`."""
        return await self._control(StopProfile(0))

    async def dump_expert_distribution(self, folder: str) -> str:
        """As `LLM.dump_expert_distribution`."""
        return await self._control(DumpExperts(0, folder))

    async def shutdown(self) -> None:
        """Ends the engine's processes. Running requests end with EngineDead."""
        self._is_started = True
        await self.front.close()

    async def _start(self) -> None:
        async with self._starting:
            if not self._is_started:
                self._is_started = True
                await self.front.start()

    async def _control(self, message: Control) -> str:
        await self._start()
        return await self.front.control(message)

    def _stream(
        self, read: _Read, sampling_params: Params | None, request_id: str, priority: int, grammar: Grammar
    ) -> OutputStream:
        async def outputs(kind: RequestOutputKind | None) -> AsyncGenerator[RequestOutput, None]:
            await self._start()
            ids = [request_id or f"request-{next(self._ids)}"]
            prompts = [await read()]
            (request,) = await asyncio.to_thread(
                self.texts.prepare, prompts, sampling_params, grammar, priority, ids, self.front.check
            )
            async with aclosing(self._outputs(request, kind or request.params.output_kind)) as results:
                async for result in results:
                    yield result

        return OutputStream(outputs)

    async def _outputs(self, request: PreparedRequest, kind: RequestOutputKind) -> AsyncGenerator[RequestOutput, None]:
        builder = OutputBuilder(request, self.texts.tokenizer)
        pieces = self.front.stream(request.ids, request.params, request_id=request.request_id, **request.options)
        async with aclosing(pieces):
            async for piece in pieces:
                builder.add(piece)
                if kind is RequestOutputKind.CUMULATIVE:
                    yield builder.snapshot()
                elif kind is RequestOutputKind.DELTA:
                    yield builder.delta(piece)
        if kind is RequestOutputKind.FINAL_ONLY:
            yield builder.output


class _Read(Protocol):
    async def __call__(self) -> TokenizedPrompt: ...
