"""Bodies and responses of Anthropic's Messages API. Undeclared fields are ignored; a null means "not given"."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """Decoded so that it can be refused by name."""


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """Decoded so that it can be refused by name."""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None  # not checked


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Another model's encrypted thought: left out."""


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
    name: str
    type: str | None = None  # "custom" or nothing; tools that run on Anthropic's servers are refused
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of the tool, with type "tool"
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None  # a hint; max_tokens bounds thought and answer together


class OutputFormat(msgspec.Struct, kw_only=True):
    type: str  # "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    format: OutputFormat | None = None  # of the answer's text


class Conversation(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens, and the part of /v1/messages that makes the prompt."""

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
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    # extensions
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    priority: int | None = None


class MessagesUsage(msgspec.Struct):
    input_tokens: int  # of the prompt, without those found in the cache
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


MessageContent = TextContent | ThinkingContent | ToolUseContent
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesResponse(msgspec.Struct):
    id: str
    model: str
    content: list[MessageContent]
    stop_reason: StopReason | None  # null only in the message_start of a stream
    stop_sequence: str | None
    usage: MessagesUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    input_tokens: int
