"""Bodies and responses of OpenAI's Responses API. Undeclared fields are ignored; a null means "not given"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from thalweg.server.logprobs import ChatLogprob
from thalweg.server.protocol import TokenBudget
from thalweg.server.refused import RefusedFields

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None  # "none" turns thinking off, any other on
    summary: str | None = None
    max_tokens: TokenBudget | None = None  # an extension: the budget of the thought


class TextFormat(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class CustomToolFormat(msgspec.Struct, kw_only=True):
    """The input of a custom tool."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | UnsetType = UNSET
    definition: str | UnsetType = UNSET


class ResponsesTool(msgspec.Struct, kw_only=True):
    type: str  # "function" or "custom"; tools that run on OpenAI's servers are refused
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomToolFormat | UnsetType = UNSET  # of a custom tool


class ResponsesInput(RefusedFields, kw_only=True):
    """POST /v1/responses/input_tokens, and the part of /v1/responses that makes the prompt."""

    REFUSED = ("conversation", "prompt")

    input: str | list[dict[str, Any]]  # a text, or items
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: str | None = None
    conversation: Any = None
    prompt: Any = None
    # extensions
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # `effort` of reasoning, by its name in chats
    thinking_token_budget: int | None = None  # tokens after which a thought is ended; -1: no limit


class ResponsesRequest(ResponsesInput, kw_only=True):
    """POST /v1/responses."""

    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None  # generated without its client, who fetches it
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    include: list[str] | None = None  # "message.output_text.logprobs"
    top_logprobs: int | None = None
    # extensions
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    priority: int | None = None


class ResponseQuery(msgspec.Struct, kw_only=True):
    """Query of GET /v1/responses/{id}."""

    stream: Literal["true", "false"] = "false"  # the events of a background response that was created as a stream
    starting_after: Annotated[int, msgspec.Meta(ge=0)] | UnsetType = UNSET  # the sequence number before the first one


class InputItemsQuery(msgspec.Struct, kw_only=True):
    """Query of GET /v1/responses/{id}/input_items."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | UnsetType = UNSET  # the id of the item before the first one


class MessageItem(msgspec.Struct, kw_only=True):
    """An input item of type "message", the default type."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class ReasoningText(msgspec.Struct):
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class ReasoningItem(msgspec.Struct, kw_only=True):
    """An input item of type "reasoning"."""

    content: list[ReasoningText] | None = None  # the model's own thought; `summary` is not read


class CallItem(msgspec.Struct, kw_only=True):
    """An input item of type "function_call"."""

    call_id: str
    name: str
    arguments: str


class CustomCallItem(msgspec.Struct, kw_only=True):
    """An input item of type "custom_tool_call"."""

    call_id: str
    name: str
    input: str


class CallOutputItem(msgspec.Struct, kw_only=True):
    """An input item of type "function_call_output" or "custom_tool_call_output"."""

    call_id: str
    output: str | list[dict[str, Any]]


class OutputText(msgspec.Struct):
    text: str
    type: Literal["output_text"] = "output_text"
    annotations: tuple[()] = ()
    logprobs: Sequence[ChatLogprob] = ()


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: Status
    summary: tuple[()] = ()
    encrypted_content: None = None


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: Status


ResponsesOutput = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesError(msgspec.Struct):
    message: str
    code: str = "server_error"


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponsesResponse(msgspec.Struct, kw_only=True):
    """A response, running or finished."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    error: ResponsesError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[ResponsesOutput] = []
    temperature: float
    top_p: float
    usage: ResponsesUsage | None = None
    warnings: list[str] | UnsetType = UNSET  # parts of a schema that are not enforced
    # as in the request, else the default
    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning = msgspec.field(default_factory=Reasoning)
    store: bool = True
    top_logprobs: int = 0
    text: TextOptions = msgspec.field(default_factory=lambda: TextOptions(format=TextFormat(type="text")))
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[ResponsesTool] = []
    truncation: str = "disabled"
    user: str | None = None
    metadata: dict[str, Any] = {}


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ResponseItems(msgspec.Struct):
    """A page of the items that a response was made from."""

    data: Sequence[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
