"""The DeepSeek-V3.2 prompt, which ships as a program and not as a Jinja template.

Source: DeepSeek's published V3.2 encoding (MIT), pinned by golden prompts in the tests. DSML is its markup for tool
calls: tags that begin with `｜DSML｜`, parameters flagged as string (the text as it stands) or not (JSON).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thalweg.text.messages import Message, ToolCall, read_messages, read_tools, to_json

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"

_TOOLS = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use \
JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, \
booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<{DSML}function_calls>
...
</{DSML}function_calls>

<function_results>
...
</function_results>

{THINK}...thinking about results{END_THINK}

Here are the functions available in JSONSchema format:
<functions>
"""


def encode_deepseek_v32(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = False,
    drop_thinking: bool = True,
    add_generation_prompt: bool = True,
    *,
    response_format: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation, BOS included.

    thinking: the next answer begins inside `<think>`; without it `</think>` closes the empty thought at once.
    drop_thinking: accepted as the published encoder accepts it; there too the reasoning before the last user or
    developer message is never rendered, whichever way it is set. add_generation_prompt=False leaves out the opening of
    the assistant's turn. response_format: a schema the answer must follow. `tools` and `response_format` go to the
    first system message (an empty one when there is none). Raises InvalidRequest naming the message and field.
    """
    return encode_v32(read_messages(messages), read_tools(tools), thinking, add_generation_prompt, response_format)


def encode_v32(
    messages: Sequence[Message],
    functions: Sequence[Mapping[str, Any]],
    thinking: bool,
    add_generation_prompt: bool,
    response_format: Mapping[str, Any] | None = None,
) -> str:
    """encode_deepseek_v32 on checked messages and functions."""
    last_user = max((i for i, message in enumerate(messages) if message.role in ("user", "developer")), default=-1)
    head = _notes(functions, response_format)
    parts = [BOS, "" if messages[0].role == "system" else head]
    for i, message in enumerate(messages):
        # The answer that follows message i begins with an open <think> exactly when its reasoning is rendered.
        mark = THINK if thinking and i >= last_user else END_THINK
        opens = add_generation_prompt or i + 1 < len(messages)
        if message.role == "system":
            parts.append(message.content + (head if i == 0 else "") + _notes(message.tools, message.response_format))
        elif message.role == "developer":
            notes = _notes(message.tools, message.response_format)
            parts.append(f"{USER}{notes}\n\n# The user's message is: {message.content}")
        elif message.role == "user":
            parts.append(USER + message.content)
        elif message.role == "assistant":
            thought = message.reasoning + END_THINK if mark == THINK else ""
            parts.append(thought + message.content + _calls(message.tool_calls) + EOS)
        elif messages[i - 1].role != "tool":
            parts.append(_results(messages, i))
        if message.role in ("user", "developer") and opens:
            parts.append(ASSISTANT + mark)
        if message.role == "tool" and opens and _ends_run(messages, i):
            parts.append("\n\n" + mark)
    return "".join(parts)


def _notes(functions: Sequence[Mapping[str, Any]], response_format: Mapping[str, Any] | None) -> str:
    text = ""
    if functions:
        text += "\n\n" + _TOOLS + "\n".join(to_json(function) for function in functions) + "\n</functions>\n"
    if response_format:
        text += "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n" + to_json(
            response_format
        )
    return text


def _calls(calls: Sequence[ToolCall]) -> str:
    if not calls:
        return ""
    invokes = "\n".join(_invoke(call) for call in calls)
    return f"\n\n<{DSML}function_calls>\n{invokes}\n</{DSML}function_calls>"


def _invoke(call: ToolCall) -> str:
    parameters = "\n".join(_parameter(name, value) for name, value in call.arguments.items())
    return f'<{DSML}invoke name="{call.name}">\n{parameters}\n</{DSML}invoke>'


def _parameter(name: str, value: Any) -> str:
    flag, text = ("true", value) if isinstance(value, str) else ("false", to_json(value))
    return f'<{DSML}parameter name="{name}" string="{flag}">{text}</{DSML}parameter>'


def _results(messages: Sequence[Message], first: int) -> str:
    """The whole run of tool results that begins at message `first`: the markup has no ids, so they stand in the order
    of the calls.
    """
    end = first
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    run = in_call_order(messages[first - 1].tool_calls, messages[first:end])
    return (
        "\n\n<function_results>"
        + "".join(f"\n<result>{message.content}</result>" for message in run)
        + "\n</function_results>"
    )


def _ends_run(messages: Sequence[Message], i: int) -> bool:
    return i + 1 == len(messages) or messages[i + 1].role != "tool"


def in_call_order(calls: Sequence[ToolCall], results: Sequence[Message]) -> list[Message]:
    """Tool results sorted by the call they answer; as given when an id is missing, unknown or used twice."""
    order = {call.id: i for i, call in enumerate(calls)}
    ids = [message.tool_call_id for message in results]
    if len(order) != len(calls) or len(set(ids)) != len(ids) or not all(i in order for i in ids):
        return list(results)
    return sorted(results, key=lambda message: order[message.tool_call_id])
