"""POST /v1/chat/completions, and /tokenize, which renders the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.errors import InvalidRequest
from thalweg.core.sampling import SamplingParams
from thalweg.server.chat_stream import ChatChoiceEncoder
from thalweg.server.context import AppContext, reply
from thalweg.server.generation import GenerationJob, PromptJob, make_job, prompt_fields
from thalweg.server.openai_stream import OpenAIStreamEncoder
from thalweg.server.parsing import given, renamed, sampling_params
from thalweg.server.protocol import ChatRequest, TokenizeRequest
from thalweg.server.stream import respond
from thalweg.server.structured_output import chat_grammar, forced_name, schema_of
from thalweg.text.chat import wants_thinking
from thalweg.text.messages import read_tools
from thalweg.text.parser import AnswerParser, opens_thought

MAX_MESSAGES = 16384
MAX_TOOLS = 1024
MANY_MESSAGES = 256  # a longer conversation is rendered on a thread
MAX_TOKENIZED = 1 << 18  # tokens of one request to /tokenize or /detokenize


async def chat_completions(ctx: AppContext, request: Request, body: ChatRequest) -> Response:
    model = ctx.model(body.model)
    job, new_parser = await prepare_chat(ctx, request, body)
    ids, params, rid, *_ = job.prompts[0]
    choices = [ChatChoiceEncoder(ctx.front.tokenizer, body, i, ids, new_parser()) for i in range(params.n)]
    encoder = OpenAIStreamEncoder(f"chatcmpl-{rid}", "chat.completion", model, body, job, choices)
    return await respond(ctx, request, job, encoder, body.stream)


class ChatJob(NamedTuple):
    job: GenerationJob
    new_parser: Callable[[], AnswerParser]  # one for each choice


async def prepare_chat(
    ctx: AppContext, request: Request, body: ChatRequest, rename: Callable[[str], str] = str
) -> ChatJob:
    """The job of a conversation, for every API that has messages. rename: a field of `body` → the client's field.

    Raises InvalidRequest, Overloaded, EngineDead.
    """
    names = {
        "max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        "logprobs": "top_logprobs",
    }

    def client_field(field: str) -> str:
        return rename(names.get(field, field))

    with renamed(rename):
        params = _params(ctx, body)
        text, ids, tools = await render(ctx, body)
        rid = ctx.rid(body.rid, request)
        grammar = chat_grammar(body, ctx.chat.formats, ctx.front.tokenizer.mark_id, text)
        await ctx.grammar_checker.check(grammar)
    prompts = [PromptJob(ids, params, rid, "messages", grammar)]
    job = make_job(
        ctx,
        request,
        prompts,
        body.priority,
        body.cache_salt,
        retention=ctx.retention.keep(text, body.chat_template_kwargs, bool(tools)),
        rename=client_field,
    )
    return ChatJob(job, _parser(ctx, body, text, tools))


async def render(ctx: AppContext, body: ChatRequest) -> tuple[str, list[int], Sequence[dict[str, Any]]]:
    """The prompt as text and as token ids, and the offered tools. Raises InvalidRequest."""
    tools = _tools(ctx, body)
    encode = partial(
        ctx.chat.encoder.encode,
        body.messages,
        tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        response_format=schema_of(body),
        template_kwargs=body.chat_template_kwargs,
    )
    text = await _rendered(ctx, body.messages, body.tools, encode)
    return text, await ctx.tokenize(text, True, "messages", ctx.ready.context), tools


async def tokenize(ctx: AppContext, request: Request, body: TokenizeRequest) -> Response:
    ctx.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "give either prompt or messages, and not both")
    special = body.add_special_tokens is not False
    texts, field = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""], "prompt"
    if body.messages is not None:
        encode = partial(
            ctx.chat.encoder.encode,
            body.messages,
            body.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs,
        )
        texts, field = [await _rendered(ctx, body.messages, body.tools, encode)], "messages"
    lists: list[list[int]] = []
    limit = MAX_TOKENIZED
    for text, where in zip(texts, prompt_fields(field, len(texts)), strict=True):
        lists.append(await ctx.tokenize(text, special, where, limit))
        limit = max(limit - len(lists[-1]), 0)
    counts = [len(ids) for ids in lists]
    batch = isinstance(body.prompt, list)
    tokens, count = (lists, counts) if batch else (lists[0], counts[0])
    return reply({"tokens": tokens, "count": count, "max_model_len": ctx.context_len})


async def _rendered(
    ctx: AppContext, messages: Sequence[Any], tools: Sequence[Any] | None, encode: Callable[[], str]
) -> str:
    for name, values, limit in (("messages", messages, MAX_MESSAGES), ("tools", tools or (), MAX_TOOLS)):
        if len(values) > limit:
            raise InvalidRequest(name, f"are {len(values)}: at most {limit} in one request")
    return await ctx.on_thread(encode) if len(messages) > MANY_MESSAGES else encode()


def _params(ctx: AppContext, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    parsed = ctx.chat.formats.reasoning or ctx.chat.formats.tools  # the parsers read special tokens
    return sampling_params(
        body,
        ctx.defaults,
        max_tokens=given(body.max_completion_tokens, body.max_tokens),
        min_tokens=given(body.min_tokens, 0),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False and not parsed,
        logprobs=given(body.top_logprobs, 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def _tools(ctx: AppContext, body: ChatRequest) -> Sequence[dict[str, Any]]:
    """The tools that the model may call. Raises InvalidRequest for tools that the prompt cannot show."""
    forced_name(body)
    if not body.tools or body.tool_choice == "none":
        return ()
    if not ctx.chat.encoder.renders_tools:
        message = "this model's chat template does not render tools: leave them out, or give another --chat-template"
        raise InvalidRequest("tools", message)
    return body.tools


def _parser(
    ctx: AppContext, body: ChatRequest, text: str, tools: Sequence[dict[str, Any]]
) -> Callable[[], AnswerParser]:
    """Makes the parsers of the answers. Without tools a call is text, without its special tokens."""
    inside = opens_thought(text) or (False if body.continue_final_message else None)  # a continued text is no thought
    return partial(
        AnswerParser,
        None if body.separate_reasoning is False else ctx.chat.formats.reasoning,
        ctx.chat.formats.tools,
        thinking=wants_thinking(None, body.chat_template_kwargs),
        inside=inside,
        functions=read_tools(tools),
        offered=bool(tools),
        hold=not body.stream,
    )
