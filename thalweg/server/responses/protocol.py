"""Bodies and answers of OpenAI's Responses API. Fields that are not declared are ignored; a null means "not given"."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class Reasoning(msgspec.Struct, kw_only=True):
    """effort: "none" and "minimal" ask for no thought, any other for one."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    """type: "function"; tools that run on OpenAI's servers are refused."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses. input: a text, or items. From `seed` on: extensions."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None


class MessageItem(msgspec.Struct, kw_only=True):
    """An input item of type "message", which need not be said."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class ReasoningText(msgspec.Struct):
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class ReasoningItem(msgspec.Struct, kw_only=True):
    """An input item of type "reasoning". summary: another model's; what the model itself wrote is content."""

    content: list[ReasoningText] | None = None


class CallItem(msgspec.Struct, kw_only=True):
    """An input item of type "function_call"."""

    call_id: str
    name: str
    arguments: str


class OutputItem(msgspec.Struct, kw_only=True):
    """An input item of type "function_call_output"."""

    call_id: str
    output: str | list[dict[str, Any]]


class OutputText(msgspec.Struct):
    text: str
    type: Literal["output_text"] = "output_text"
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class ReasoningAnswer(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: Status
    summary: tuple[()] = ()
    encrypted_content: None = None


class CallAnswer(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


ItemAnswer = OutputMessage | ReasoningAnswer | CallAnswer


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    message: str
    code: str = "server_error"


class Incomplete(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """A response, at any moment of its life."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[ItemAnswer]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[ResponsesTool]
    top_p: float
    truncation: str
    usage: ResponsesUsage | None = None
    user: str | None
    metadata: dict[str, Any]
    background: Literal[False] = False


class Deleted(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
