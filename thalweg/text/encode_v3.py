"""The prompts of DeepSeek V3, R1, R1-0528, V3.1, V3.1-Terminus and V3.2-Exp for checkpoints without a chat template.

Each follows the Jinja template published with its model (MIT). Faults of the first V3 and R1 templates are not
repeated: they forget to close a lone tool call and close three of them twice, and of R1's, a message with text loses
its calls, one system message of two is lost, and a thought behind tool results is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.text.encode_v32 import ASSISTANT, BOS, END_THINK, EOS, THINK, USER
from thalweg.text.messages import Message, ToolCall, to_json

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
OUTPUTS_BEGIN, OUTPUTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
OUTPUT_BEGIN, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"


@dataclass(frozen=True)
class Style:
    """Where the V3, R1 and R1-0528 templates differ.

    opens: which message writes `<｜Assistant｜>`: "user" (after every user turn), "next" (after a user turn that is not
    the last message) or "assistant" (before its own text). generation: the generation prompt. strip_thoughts: history
    keeps only the text after the last `</think>`. tools: the template has a place for tool schemas.
    """

    opens: str
    generation: str
    strip_thoughts: bool
    tools: bool


V3 = Style(opens="user", generation=ASSISTANT, strip_thoughts=False, tools=False)
R1 = Style(opens="assistant", generation=f"{ASSISTANT}{THINK}\n", strip_thoughts=True, tools=False)
R1_0528 = Style(opens="next", generation=ASSISTANT, strip_thoughts=True, tools=True)

_R1_TOOLS = (
    "You are a helpful assistant with tool calling capabilities. When a tool call is needed, you MUST use the following"
    " format to "
    f"issue the call:\n{CALLS_BEGIN}{CALL_BEGIN}function{SEP}FUNCTION_NAME\n"
    f'```json\n{{"param1": "value1", "param2": "value2"}}\n```{CALL_END}{CALLS_END}\n\n'
    "Make sure the JSON is valid.## Tools\n\n### Function\n\nYou have the following functions available:\n\n"
)

_V31_TOOLS_HEAD = "## Tools\nYou have access to the following tools:\n"
_V31_TOOLS_TAIL = (
    "\nIMPORTANT: ALWAYS adhere to this exact format for tool"
    f" use:\n{CALLS_BEGIN}{CALL_BEGIN}tool_call_name{SEP}tool_call_arguments{CALL_END}{{{{additional_tool_calls}}}}{CALLS_END}\n\nWhere:\n\n-"
    " `tool_call_name` must be an exact match to one of the available tools\n- `tool_call_arguments` must be valid"
    " JSON that strictly follows the tool's Parameters Schema\n- For multiple tool calls, chain them directly without"
    " separators or spaces\n"
)


def encode_v3(
    style: Style, messages: Sequence[Message], functions: Sequence[Mapping[str, Any]], add_generation_prompt: bool
) -> str:
    """The prompt of V3, R1 or R1-0528 (by `style`), BOS included."""
    parts = [BOS, _system(messages, _r1_tools(functions) if style.tools else "", always_apart=False)]
    turns = [message for message in messages if message.role not in ("system", "developer")]
    for i, message in enumerate(turns):
        after_tool = i > 0 and turns[i - 1].role == "tool"
        if message.role == "user":
            opens = style.opens == "user" or (style.opens == "next" and message is not messages[-1])
            parts.append(USER + message.content + (ASSISTANT if opens else ""))
        elif message.role == "tool":
            parts.append(("\n" if after_tool else OUTPUTS_BEGIN) + OUTPUT_BEGIN + message.content + OUTPUT_END)
        else:
            opening = OUTPUTS_END if after_tool else ASSISTANT if style.opens == "assistant" else ""
            content = message.content.rpartition(END_THINK)[2] if style.strip_thoughts else message.content
            parts.append(opening + content + _v3_calls(message.tool_calls) + EOS)
    last = turns[-1].role if turns else "system"
    if last == "tool":
        parts.append(OUTPUTS_END)
    elif add_generation_prompt and not (last == "user" and style.opens == "user"):
        parts.append(style.generation)
    return "".join(parts)


def encode_v31(
    messages: Sequence[Message],
    functions: Sequence[Mapping[str, Any]],
    thinking: bool,
    add_generation_prompt: bool,
    *,
    terminus: bool,
) -> str:
    """The prompt of V3.1, or of V3.1-Terminus and V3.2-Exp (`terminus`: they also open a turn that no user message
    precedes).
    """
    parts = [BOS, _system(messages, _v31_tools(functions), always_apart=True)]
    previous = "none"
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        if role == "user":
            parts.append(USER + message.content)
        elif role == "tool":
            parts.append(OUTPUT_BEGIN + message.content + OUTPUT_END)
        elif role == "assistant":
            if previous == "user" or (terminus and previous == "system" and message.tool_calls):
                parts.append(ASSISTANT + END_THINK)
            parts.append(_v31_turn(message, after_tool=previous == "tool") + EOS)
        # A system message moves to the front: it does not end the user's turn, and counts as a turn of its own only
        # before all others.
        if role != "system" or previous == "none":
            previous = role
    if add_generation_prompt and (previous == "user" or (terminus and previous != "tool")):
        parts.append(ASSISTANT + (THINK if thinking else END_THINK))
    return "".join(parts)


def _system(messages: Sequence[Message], tools: str, *, always_apart: bool) -> str:
    """All system text (developer messages too: OpenAI's newer name for it) joined by blank lines, then the tools
    section.

    `always_apart`: a blank line precedes the tools even when there is no other text.
    """
    text = "\n\n".join(message.content for message in messages if message.role in ("system", "developer"))
    return f"{text}\n\n{tools}" if tools and (text or always_apart) else text + tools


def _r1_tools(functions: Sequence[Mapping[str, Any]]) -> str:
    if not functions:
        return ""
    tools = ({"type": "function", "function": function} for function in functions)
    return _R1_TOOLS + "".join(f"\n```json\n{to_json(tool)}\n```\n" for tool in tools)


def _v31_tools(functions: Sequence[Mapping[str, Any]]) -> str:
    if not functions:
        return ""
    return _V31_TOOLS_HEAD + "".join(_v31_tool(function) for function in functions) + _V31_TOOLS_TAIL


def _v31_tool(function: Mapping[str, Any]) -> str:
    description = function.get("description") or ""
    return (
        f"\n### {function['name']}\nDescription: {description}\n\nParameters:"
        f" {to_json(function.get('parameters') or {})}\n"
    )


def _v3_calls(calls: Sequence[ToolCall]) -> str:
    if not calls:
        return ""
    body = "\n".join(f"{CALL_BEGIN}function{SEP}{call.name}\n```json\n{call.raw}\n```{CALL_END}" for call in calls)
    return CALLS_BEGIN + body + CALLS_END


def _v31_turn(message: Message, *, after_tool: bool) -> str:
    if message.tool_calls:
        calls = "".join(f"{CALL_BEGIN}{call.name}{SEP}{call.raw}{CALL_END}" for call in message.tool_calls)
        return message.content + CALLS_BEGIN + calls + CALLS_END
    _, closed, after = message.content.partition(END_THINK)
    return after if closed and not after_tool else message.content
