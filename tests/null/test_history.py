"""Which part of an answer the cache keeps, compared with the next turn's real prompt, for each encoder and way to end a
turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.text import retention
from thalweg.text.chat import BUILTIN_ENCODERS, ChatEncoder, ChatFormat, ParserNames, builtin
from thalweg.text.parser import TOOL_FORMATS, is_in_thought
from thalweg.text.retention import ThinkingRetention
from thalweg.text.template import Template
from thalweg.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(Path(__file__).resolve().parents[2] / "models" / "tiny")
EOS = "<｜end▁of▁sentence｜>"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
CALLS = [{"id": "call1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
THOUGHT, ANSWER = "I must think about this.", "The answer is 42."

# As Qwen3's: thoughts since the last question are rendered, and an answer without thinking follows an empty thought
# that is left out later.
QWENISH = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<｜Assistant｜>' }}
{%- if loop.index0 > ns.last and m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{ '<｜tool▁calls▁begin｜>' + call.function.name + '<｜tool▁calls▁end｜>' }}{% endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜User｜>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"""
KEEPS_ALL = QWENISH.replace("loop.index0 > ns.last and ", "")


def chat(name: str, strip: bool | None = None) -> ChatFormat:
    if name in BUILTIN_ENCODERS:
        return ChatFormat(builtin(name), BUILTIN_ENCODERS[name].formats, "", strip)
    source = {"qwenish": QWENISH, "keeps-all": KEEPS_ALL}[name]
    return ChatFormat(
        ChatEncoder("jinja", {"default": Template(source, {})}, True), ParserNames("qwen3", "deepseekv31"), "", strip
    )


def talk(turns: int) -> list[dict[str, Any]]:
    """A conversation that ends with a question, or with a tool's result."""
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is it?"}]
    said = {"role": "assistant", "content": "It is so.", "reasoning_content": "Hm."}
    return [*asked, *[said, {"role": "user", "content": "And that?"}] * turns]


NAMES = [name for name in BUILTIN_ENCODERS if name != "deepseek-v32-speciale"]  # V3.2's template; it calls no tools


def called(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    call = {"role": "assistant", "content": "", "reasoning_content": "I call.", "tool_calls": CALLS}
    return [*messages, call, {"role": "tool", "content": "43", "tool_call_id": "call1"}]


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("after_tool", [False, True])
@pytest.mark.parametrize("turns", [0, 2])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", [*NAMES, "qwenish", "keeps-all"])
def test_what_is_kept_is_what_the_next_turn_begins_with(
    name: str, thinking: bool, turns: int, after_tool: bool, calls: bool
) -> None:
    """The output is written as the model would write it; the next prompt is rendered, and both are compared token by
    token.
    """
    found = chat(name)
    tools = TOOLS if found.encoder.renders_tools or name not in BUILTIN_ENCODERS else None
    arguments = {"thinking": thinking}
    messages = called(talk(turns)) if after_tool else talk(turns)
    prompt = found.encoder.encode(messages, tools, template_kwargs=arguments)
    keep = ThinkingRetention(found, TOKENIZER.mark_id).keep(prompt, arguments, bool(tools))
    inside = is_in_thought(prompt)
    thinks = inside or (found.formats.reasoning is not None and thinking and not prompt.rstrip().endswith("</think>"))
    thought = THOUGHT if thinks else ""
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else ANSWER, "reasoning_content": thought}
    if calls:
        answer["tool_calls"] = CALLS
        then = [answer, {"role": "tool", "content": "44", "tool_call_id": "call1"}]
    else:
        then = [answer, {"role": "user", "content": "Why?"}]
    following = found.encoder.encode([*messages, *then], tools, template_kwargs=arguments)
    body = ANSWER if not calls else following[following.rindex(mark(name)) : following.rindex(EOS)]
    output = ("" if inside or not thinks else "<think>") + (f"{THOUGHT}</think>" if thinks else "") + body + EOS
    asked, out, after = TOKENIZER.encode(prompt), TOKENIZER.encode(output, False), TOKENIZER.encode(following)
    common = shared([*asked, *out], after)
    if keep.drops_output(out, ended=True):
        assert common <= len(asked), (
            f"dropped, although the next turn renders {common - len(asked)} tokens of the output again"
        )
    elif thinks or calls:
        assert common == len(asked) + len(out), (
            f"kept, although the next turn renders {common} of {len(asked)} + {len(out)}"
        )


def mark(name: str) -> str:
    return TOOL_FORMATS[chat(name).formats.tools or ""].mark.replace("｜DSML｜", "\n\n<｜DSML｜function_calls")


@pytest.mark.parametrize(
    ("name", "strip", "strips", "keep"),
    [
        ("deepseek-v32", None, True, CacheRetention(False, tool_call_id=2047)),
        ("deepseek-v32", True, True, CacheRetention(False, tool_call_id=2047)),
        ("deepseek-v32", False, False, RETAIN_ALL),
        ("deepseek-v31", None, True, CacheRetention(False)),
        ("deepseek-r1", None, True, CacheRetention(False)),
        ("deepseek-r1-0528", None, True, CacheRetention(False, think_start_id=2030)),
        ("deepseek-v3", None, False, RETAIN_ALL),
        ("deepseek-v3", True, False, RETAIN_ALL),
        ("qwenish", None, True, CacheRetention(False, think_start_id=2030, tool_call_id=2038)),
        ("keeps-all", None, False, RETAIN_ALL),
        ("keeps-all", True, True, CacheRetention(False, think_start_id=2030, tool_call_id=2038)),
    ],
)
def test_the_wish_and_the_template(name: str, strip: bool | None, strips: bool, keep: CacheRetention) -> None:
    found = chat(name, strip)
    memory = ThinkingRetention(found, TOKENIZER.mark_id)
    prompt = found.encoder.encode(talk(0), template_kwargs={"thinking": True})
    assert (memory.strips, memory.keep(prompt, {"thinking": True}, True)) == (strips, keep)
    assert memory.keep(prompt, {"thinking": True}, False).tool_call_id == -1, "without tools nothing is called"


def test_an_answer_without_a_thought_stays_where_the_template_keeps_its_prompt() -> None:
    found = chat("deepseek-v32")
    prompt = found.encoder.encode(talk(0), template_kwargs={})
    assert ThinkingRetention(found, TOKENIZER.mark_id).keep(prompt, {}, True) == RETAIN_ALL
    found = chat("qwenish")
    prompt = found.encoder.encode(talk(0), template_kwargs={"enable_thinking": False})
    assert (
        ThinkingRetention(found, TOKENIZER.mark_id).keep(prompt, {"enable_thinking": False}, True).keeps_thoughts
        is False
    )


def test_what_drops() -> None:
    assert not RETAIN_ALL.drops_output((1, 2), ended=True) and not CacheRetention(False).drops_output((), ended=True)
    assert CacheRetention(False).drops_output((1,), ended=False) and CacheRetention(False).drops_output(
        (1,), ended=True
    )
    opens = CacheRetention(False, think_start_id=5)
    assert opens.drops_output((5, 1), ended=False) and not opens.drops_output((1, 5), ended=False)
    calls = CacheRetention(False, tool_call_id=6)
    assert calls.drops_output((1, 6), ended=False), "not before the end: the answer may still be cut off"
    assert not calls.drops_output((1, 6, 2), ended=True) and calls.drops_output((1, 2), ended=True)


def test_a_template_is_asked_once_for_each_set_of_arguments_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "KNOWN", 2)
    found, renders = chat("qwenish"), []
    monkeypatch.setattr(Template, "render", counted(Template.render, renders))
    memory = ThinkingRetention(found, TOKENIZER.mark_id)
    for arguments, new in (({}, True), ({}, False), ({"x": [1]}, True), ({"x": object}, True), ({}, True)):
        before = len(renders)
        memory.keep("<｜Assistant｜>", arguments, True)
        assert (len(renders) > before) == new
    assert len(memory._behaviors) == 2


def counted(real: Any, calls: list[int]) -> Any:
    def render(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return real(*args, **named)

    return render


def test_a_template_that_refuses_results_is_never_asked_to_render_one() -> None:
    refuses = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor"
        " %}<think>"
    )
    found = ChatFormat(
        ChatEncoder("jinja", {"default": Template(refuses, {})}, True), ParserNames("deepseek-r1", "deepseekv31"), ""
    )
    assert ThinkingRetention(found, TOKENIZER.mark_id).keep("q<think>", {}, True) == CacheRetention(False)
