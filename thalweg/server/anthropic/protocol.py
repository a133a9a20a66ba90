"""Bodies and answers of Anthropic's Messages API. Fields that are not declared are ignored; a null means "not
given".
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """Read so that it can be refused by name."""


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """Read so that it can be refused by name."""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """signature: not looked at."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Another model's secret: left out."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """type: "custom" or nothing; tools that run on Anthropic's servers are refused. input_schema: a JSON schema."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """name: the tool of type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """budget_tokens: taken as a hint; max_tokens bounds thought and answer together."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """type: "json_schema"."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """format: what the text of the answer must match."""

    format: OutputFormat | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens, and what /v1/messages has in common with it."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    mcp_servers: Any = None
    container: Any = None
    output_config: OutputConfig | None = None


class MessagesRequest(Conversation, kw_only=True):
    """POST /v1/messages. From `seed` on: extensions."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    priority: int | None = None


class MessagesUsage(msgspec.Struct):
    """input_tokens: of the prompt, without those that were found in the cache, which are cache_read_input_tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextAnswer(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingAnswer(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseAnswer(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


BlockAnswer = TextAnswer | ThinkingAnswer | ToolUseAnswer
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesResponse(msgspec.Struct):
    """A whole answer. stop_reason: null only in the message_start of a stream."""

    id: str
    model: str
    content: list[BlockAnswer]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    input_tokens: int
