"""Anthropic's conversation → the messages that every encoder reads. An error names the field as the client wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from thalweg.server.conversion import ChatConversion
from thalweg.server.protocol import ChatRequest, ResponseFormat


def chat_of(body: Conversation, conversion: ChatConversion) -> ChatRequest:
    """The same conversation as a chat request; its messages are those of `conversion`. Raises InvalidRequest."""
    _refuse(body)
    system = body.system if isinstance(body.system, str) else _joined(body.system or (), "system")
    if system:
        conversion.add("system", "system", content=system)
    for i, message in enumerate(body.messages):
        _write(message, f"messages[{i}]", conversion)
    chat = ChatRequest(messages=conversion.messages, model=body.model)
    chat.continue_final_message = bool(body.messages) and body.messages[-1].role == "assistant"
    chat.chat_template_kwargs = {"thinking": body.thinking is not None and body.thinking.type != "disabled"}
    chat.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None
    if body.tool_choice is not None:
        chat.tool_choice = _choice(body.tool_choice)
        chat.parallel_tool_calls = False if body.tool_choice.disable_parallel_tool_use else None
    if body.output_config is not None and body.output_config.format is not None:
        wanted = body.output_config.format
        chat.response_format = ResponseFormat(type=wanted.type, json_schema={"schema": wanted.schema})
    if isinstance(body, MessagesRequest):
        _set_sampling(chat, body)
    return chat


def _set_sampling(chat: ChatRequest, body: MessagesRequest) -> None:
    if body.max_tokens < 1:
        raise InvalidRequest("max_tokens", f"must be at least 1, got {body.max_tokens}")
    chat.max_tokens, chat.stop, chat.stream = body.max_tokens, body.stop_sequences, body.stream
    chat.temperature, chat.top_p, chat.top_k, chat.min_p = body.temperature, body.top_p, body.top_k, body.min_p
    chat.repetition_penalty, chat.seed = body.repetition_penalty, body.seed
    chat.cache_salt, chat.priority = body.cache_salt, body.priority


def _refuse(body: Conversation) -> None:
    for name, value in {"mcp_servers": body.mcp_servers, "container": body.container}.items():
        if value:
            raise InvalidRequest(name, "is not supported here and would change the result: leave it out")
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and budget < 1:
        raise InvalidRequest("thinking.budget_tokens", f"must be at least 1, got {budget}")


def _write(message: InputMessage, field: str, conversion: ChatConversion) -> None:
    """One message of theirs may be several of ours: each tool result is one, and stands before the text beside it."""
    if isinstance(message.content, str):
        return conversion.add(field, message.role, content=message.content)
    if message.role == "assistant":
        return _write_answer(message.content, field, conversion)
    texts: list[TextBlock] = []
    for i, block in enumerate(message.content):
        where = f"{field}.content[{i}]"
        if isinstance(block, ToolResultBlock) and message.role == "user":
            content = (
                block.content if isinstance(block.content, str) else _joined(block.content or (), where + ".content")
            )
            conversion.add(where, "tool", tool_call_id=block.tool_use_id, content=content)
        else:
            texts.append(_text(block, where))
    if texts or not message.content:
        conversion.add(field, message.role, content="".join(block.text for block in texts))


def _write_answer(blocks: Sequence[Block], field: str, conversion: ChatConversion) -> None:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        if isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append(
                {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            )
        elif not isinstance(block, RedactedThinkingBlock):
            texts.append(_text(block, f"{field}.content[{i}]").text)
    rest: dict[str, Any] = {"reasoning_content": "".join(thoughts)} if thoughts else {}
    if calls:
        rest["tool_calls"] = calls
    conversion.add(field, "assistant", content="".join(texts), **rest)


def _text(block: Block, field: str) -> TextBlock:
    if isinstance(block, TextBlock):
        return block
    kind = type(block).__struct_config__.tag
    if isinstance(block, ImageBlock | DocumentBlock):
        raise InvalidRequest(f"{field}.type", f"is {kind!r}: this model reads text only")
    raise InvalidRequest(f"{field}.type", f"is {kind!r}, which has no place in a message of this role")


def _joined(blocks: Iterable[Block], field: str) -> str:
    return "".join(_text(block, f"{field}[{i}]").text for i, block in enumerate(blocks))


def _tool(tool: AnthropicTool, field: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"{field}.type", f"is {tool.type!r}: only your own tools can be called here")
    if tool.input_schema is None:
        raise InvalidRequest(f"{field}.input_schema", "is required")
    description = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **description, "parameters": tool.input_schema}}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest("tool_choice.name", "is required with type 'tool'")
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)
