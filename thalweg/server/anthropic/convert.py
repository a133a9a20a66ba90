"""Converts Anthropic's conversation to a chat request. An error names the field as the client wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thalweg.core.errors import InvalidRequest
from thalweg.server.anthropic.protocol import (
    AnthropicTool,
    Block,
    Conversation,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from thalweg.server.conversion import ChatConversion, tool, tool_call
from thalweg.server.protocol import ChatRequest, ResponseFormat


def chat_of(body: Conversation, conversion: ChatConversion) -> ChatRequest:
    """Raises InvalidRequest."""
    _refuse(body)
    system = body.system if isinstance(body.system, str) else _text(body.system or (), "system")
    if system:
        conversion.add("system", "system", content=system)
    for i, message in enumerate(body.messages):
        _add_message(message, f"messages[{i}]", conversion)
    chat = conversion.chat_request(body)
    chat.continue_final_message = bool(body.messages) and body.messages[-1].role == "assistant"
    chat.chat_template_kwargs = {"thinking": body.thinking is not None and body.thinking.type != "disabled"}
    chat.tools = [_tool(entry, f"tools[{i}]") for i, entry in enumerate(body.tools or ())] or None
    if body.tool_choice is not None:
        chat.tool_choice = _tool_choice(body.tool_choice)
        chat.parallel_tool_calls = False if body.tool_choice.disable_parallel_tool_use else None
    if body.output_config is not None and body.output_config.format is not None:
        form = body.output_config.format
        chat.response_format = ResponseFormat(type=form.type, json_schema={"schema": form.schema})
    if isinstance(body, MessagesRequest):
        if body.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"must be at least 1, got {body.max_tokens}")
        chat.max_tokens, chat.stop = body.max_tokens, body.stop_sequences
    return chat


def _refuse(body: Conversation) -> None:
    for name, value in {"mcp_servers": body.mcp_servers, "container": body.container}.items():
        if value:
            raise InvalidRequest(name, "is not supported here and would change the result: leave it out")
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and budget < 1:
        raise InvalidRequest("thinking.budget_tokens", f"must be at least 1, got {budget}")


def _add_message(message: InputMessage, field: str, conversion: ChatConversion) -> None:
    """Adds one message, and before it one for each tool result among its blocks."""
    if isinstance(message.content, str):
        return conversion.add(field, message.role, content=message.content)
    texts: list[str] = []
    rest: dict[str, Any] = {}
    for i, block in enumerate(message.content):
        where = f"{field}.content[{i}]"
        match block, message.role:
            case ToolResultBlock(), "user":
                parts = block.content or ()
                content = parts if isinstance(parts, str) else _text(parts, where + ".content")
                conversion.add(where, "tool", tool_call_id=block.tool_use_id, content=content)
            case ThinkingBlock(), "assistant":
                rest["reasoning_content"] = rest.get("reasoning_content", "") + block.thinking
            case ToolUseBlock(), "assistant":
                rest.setdefault("tool_calls", []).append(tool_call(block.id, block.name, block.input))
            case RedactedThinkingBlock(), "assistant":
                pass
            case _:
                texts.append(_text_of(block, where))
    if texts or message.role == "assistant" or not message.content:
        conversion.add(field, message.role, content="".join(texts), **rest)


def _text_of(block: Block, field: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    kind = type(block).__struct_config__.tag
    if isinstance(block, ImageBlock | DocumentBlock):
        raise InvalidRequest(f"{field}.type", f"is {kind!r}: this model reads text only")
    raise InvalidRequest(f"{field}.type", f"is {kind!r}, which is not allowed in a message of this role")


def _text(blocks: Iterable[Block], field: str) -> str:
    return "".join(_text_of(block, f"{field}[{i}]") for i, block in enumerate(blocks))


def _tool(entry: AnthropicTool, field: str) -> dict[str, Any]:
    if entry.type not in (None, "custom"):
        raise InvalidRequest(f"{field}.type", f"is {entry.type!r}: only your own tools can be called here")
    if entry.input_schema is None:
        raise InvalidRequest(f"{field}.input_schema", "is required")
    return tool(name=entry.name, description=entry.description, parameters=entry.input_schema)


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest("tool_choice.name", "is required with type 'tool'")
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)
