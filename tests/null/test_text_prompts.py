"""Chat prompts: golden prompts byte for byte, template features, and errors that name the message."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thalweg.core.errors import CheckpointError, InvalidRequest, UnsupportedConfig
from thalweg.text import sandbox
from thalweg.text.chat import (
    BUILTIN_ENCODERS,
    ChatOptions,
    ParserNames,
    builtin,
    builtin_encoder,
    choose_chat,
    formats_of,
)
from thalweg.text.messages import read_messages, read_tools

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
encode_deepseek_v32 = builtin("deepseek-v32").encode
GOLDEN = json.loads((Path(__file__).parent / "data" / "chat_golden.json").read_text(encoding="utf-8"))["cases"]
ENCODERS = {"V3-0324": "deepseek-v3", "R1": "deepseek-r1", "V3.1": "deepseek-v31", "V3.2": "deepseek-v32"}
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}


def call(arguments: str, name: str = "f", id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["id"])
def test_golden_prompt(case: dict[str, Any]) -> None:
    encoder = builtin(ENCODERS[case["model"]])
    prompt = encoder.encode(
        case["messages"],
        case["tools"],
        thinking=case["thinking"],
        add_generation_prompt=case["add_generation_prompt"],
    )
    assert prompt == case["expected_prompt"]


def test_v32_keeps_reasoning_only_after_the_last_user_message() -> None:
    turn = [
        {"role": "assistant", "content": None, "reasoning_content": "THOUGHT", "tool_calls": [call('{"n": 1}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "R"},
        {"role": "assistant", "content": "A", "reasoning_content": "AFTER"},
    ]
    during = encode_deepseek_v32([USER, *turn], thinking=True)
    assert "<｜Assistant｜><think>THOUGHT</think>" in during and "<think>AFTER</think>A" + EOS in during
    later = encode_deepseek_v32([USER, *turn, USER], thinking=True)
    assert "THOUGHT" not in later and "AFTER" not in later
    assert later.endswith("</function_results>\n\n</think>A" + EOS + "<｜User｜>hi<｜Assistant｜><think>")
    assert later.startswith(
        BOS + '<｜User｜>hi<｜Assistant｜></think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">'
    )


def test_v32_derives_the_string_flag_from_the_json_type() -> None:
    arguments = {"s": 'a "b"\n', "n": 1.5, "t": True, "z": None, "l": ["é", {}], "five": "5"}
    prompt = encode_deepseek_v32([USER, {"role": "assistant", "tool_calls": [call(json.dumps(arguments))]}])
    for line in ('"s" string="true">a "b"\n<', '"n" string="false">1.5<', '"t" string="false">true<',
                 '"z" string="false">null<', '"l" string="false">["é", {}]<', '"five" string="true">5<'):  # fmt: skip
        assert f"<｜DSML｜parameter name={line}/｜DSML｜parameter>" in prompt
    empty = encode_deepseek_v32([USER, {"role": "assistant", "tool_calls": [call("{}")]}])
    assert '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>' in empty


def test_v32_results_stand_in_the_order_of_the_calls() -> None:
    history = [
        USER,
        {"role": "assistant", "tool_calls": [call("{}", id="a"), call("{}", id="b")]},
        {"role": "tool", "tool_call_id": "b", "content": "SECOND"},
        {"role": "tool", "tool_call_id": "a", "content": "FIRST"},
    ]
    prompt = encode_deepseek_v32(history)
    assert "\n<result>FIRST</result>\n<result>SECOND</result>\n</function_results>\n\n</think>" in prompt
    assert encode_deepseek_v32(history, add_generation_prompt=False).endswith("</function_results>")


def test_v32_tools_go_to_the_system_message_and_developers_bring_their_own() -> None:
    assert encode_deepseek_v32([USER], [TOOL]).startswith(BOS + "\n\n## Tools\n\nYou have")
    system = {"role": "system", "content": "S"}
    prompt = encode_deepseek_v32([system, USER], [TOOL], response_format={"type": "object"})
    assert prompt.startswith(BOS + "S\n\n## Tools") and "</functions>\n\n\n## Response Format:" in prompt
    assert '\n{"name": "f", "description": "é", "parameters": {"type": "object"}}\n</functions>\n' in prompt
    developer = encode_deepseek_v32([{"role": "developer", "content": "Q", "tools": [TOOL]}], thinking=True)
    assert developer.startswith(BOS + "<｜User｜>\n\n## Tools")
    assert developer.endswith("\n\n# The user's message is: Q<｜Assistant｜><think>")


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert encode_deepseek_v32([{"role": "user", "content": parts}]) == BOS + "<｜User｜>ab<｜Assistant｜></think>"


def test_v3_tool_turns() -> None:
    history = [
        USER,
        {"role": "assistant", "content": "t", "tool_calls": [call('{"a":1}'), call("{}", "g", "c2")]},
        {"role": "tool", "tool_call_id": "c1", "content": "R1"},
        {"role": "tool", "tool_call_id": "c2", "content": "R2"},
    ]
    assert builtin("deepseek-v3").encode(history) == (
        BOS
        + "<｜User｜>hi<｜Assistant｜>t<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a":1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>" + EOS + "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>R1<｜tool▁output▁end｜>\n"
        "<｜tool▁output▁begin｜>R2<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    )
    assert builtin("deepseek-v31").encode(history) == (
        BOS + "<｜User｜>hi<｜Assistant｜></think>t<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        '{"a":1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>' + EOS
        + "<｜tool▁output▁begin｜>R1<｜tool▁output▁end｜><｜tool▁output▁begin｜>R2<｜tool▁output▁end｜>"
    )  # fmt: skip


def test_r1_history_drops_thoughts() -> None:
    history = [USER, {"role": "assistant", "content": "a</think>b</think>c"}, USER]
    head = BOS + "<｜User｜>hi<｜Assistant｜>c" + EOS + "<｜User｜>hi"
    assert builtin("deepseek-r1").encode(history) == head + "<｜Assistant｜><think>\n"
    assert builtin("deepseek-r1-0528").encode(history) == head + "<｜Assistant｜>"
    assert builtin("deepseek-r1").encode(history, add_generation_prompt=False) == head
    assert '```json\n{"type": "function"' in builtin("deepseek-r1-0528").encode([USER], [TOOL])
    assert not builtin("deepseek-r1").renders_tools


def test_v31_and_terminus_differ_in_a_turn_that_no_user_opened() -> None:
    system = [{"role": "system", "content": "S"}]
    assert builtin("deepseek-v31").encode(system, thinking=True) == BOS + "S"
    assert builtin("deepseek-v31-terminus").encode(system, thinking=True) == BOS + "S<｜Assistant｜><think>"


@pytest.mark.parametrize("name", BUILTIN_ENCODERS)
def test_a_final_message_can_be_continued(name: str) -> None:
    encoder = builtin(name)
    prompt = encoder.encode([USER, {"role": "assistant", "content": "The ans"}], continue_final_message=True)
    assert prompt.endswith("The ans") and prompt.startswith(BOS) and prompt.count(BOS) == 1
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        encoder.encode([USER], continue_final_message=True)


def test_other_template_kwargs_do_not_reach_a_builtin_template() -> None:
    for name in BUILTIN_ENCODERS:
        kwargs = {"response_format": "INJECT", "style": "INJECT", "tools": ["INJECT"]}
        assert builtin(name).encode([USER], template_kwargs=kwargs) == builtin(name).encode([USER])


def test_a_continued_message_ends_with_its_text_in_a_checkpoints_template(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}\n" + EOS)
    encoder = choose_chat(tmp_path, {}).encoder
    assert encoder.encode([USER, {"role": "assistant", "content": "So"}], continue_final_message=True) == "So"


def test_thinking_may_come_in_the_template_kwargs() -> None:
    encoder = builtin("deepseek-v32")
    for kwargs in ({"thinking": True}, {"enable_thinking": True}):
        assert encoder.encode([USER], template_kwargs=kwargs).endswith("<think>")
        assert encoder.encode([USER], thinking=False, template_kwargs=kwargs).endswith("</think>")


@pytest.mark.parametrize(
    "messages, field",
    [
        ([], "messages"),
        ("hi", "messages"),
        ([USER, 5], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "bot", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": ["a", {"type": "image_url"}]}], "messages[0].content[1].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "tool_calls": [call("{}")]}], "messages[0].tool_calls"),
        ([USER, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls"),
        ([USER, {"role": "assistant", "tool_calls": ["f"]}], "messages[1].tool_calls[0].function"),
        ([USER, {"role": "assistant", "tool_calls": [call("{}", "")]}], "messages[1].tool_calls[0].function.name"),
        ([USER, {"role": "assistant", "tool_calls": [call("{")]}], "messages[1].tool_calls[0].function.arguments"),
        ([USER, {"role": "assistant", "tool_calls": [call("[]")]}], "messages[1].tool_calls[0].function.arguments"),
        ([USER, {"role": "tool", "content": "r"}], "messages[1].role"),
        (
            [{"role": "assistant", "tool_calls": [call("{}")]}, *[{"role": "tool", "content": "r"}] * 2],
            "messages[2]",
        ),
    ],
)
def test_errors_name_the_message_and_field(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read_messages(messages)
    assert error.value.field == field


@pytest.mark.parametrize(
    "tools, field",
    [
        ("f", "tools"),
        ([{"type": "function"}], "tools[0].function"),
        ([TOOL, {"type": "web_search", "function": {}}], "tools[1].type"),
        ([{"function": {"description": "x"}}], "tools[0].function.name"),
        ([{"function": {"name": "f", "parameters": "{}"}}], "tools[0].function.parameters"),
    ],
)
def test_errors_name_the_tool(tools: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read_tools(tools)
    assert error.value.field == field


QWENISH = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}{%- for c in m.tool_calls or []"
    " %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{%- endfor %}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking"
    " %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def chat_of(folder: Path, template: str | None, wish: str = "auto", **config: Any) -> Any:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return choose_chat(folder, config, ChatOptions(wish, {"bos_token": BOS, "eos_token": EOS}))


def test_the_checkpoints_template_wins(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, QWENISH, architectures=["DeepseekV32ForCausalLM"])
    assert chat.encoder.name == "jinja" and chat.formats == ParserNames("qwen3", "qwen25")
    prompt = chat.encoder.encode([USER], thinking=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert chat.encoder.encode([USER]).endswith("<|im_start|>assistant\n")
    history = [USER, {"role": "assistant", "content": "", "tool_calls": [call('{"k": "é<"}')]}]
    assert '<tool_call>{"k": "é<"}</tool_call>' in chat.encoder.encode(history)
    final = [USER, {"role": "assistant", "content": "The ans "}]
    assert chat.encoder.encode(final, continue_final_message=True).endswith("<|im_start|>assistant\nThe ans")


def test_tools_that_no_parser_reads_are_refused(tmp_path: Path) -> None:
    """Unknown markup would come back as text, and a forced call could not be forced."""
    unknown = "{% for tool in tools or [] %}[TOOLS]{% endfor %}{{ messages[0].content }}"
    plain = chat_of(tmp_path, unknown, architectures=["MistralForCausalLM"])
    assert plain.formats.tools is None and "no parser knows the calls" in plain.no_tools
    assert "another --chat-template" in plain.no_tools and not replace(plain, shows_calls=True).no_tools
    v32 = chat_of(tmp_path, unknown, architectures=["DeepseekV32ForCausalLM"])
    assert "--chat-template deepseek-v32" in v32.no_tools
    assert "does not render tools" in chat_of(tmp_path, "{{ messages[0].content }}").no_tools
    assert not chat_of(tmp_path, QWENISH + "{{ tools }}").no_tools


def test_speciale_calls_no_tools(tmp_path: Path) -> None:
    chat = choose_chat(
        tmp_path, {"architectures": ["DeepseekV32ForCausalLM"]}, name="deepseek-ai/DeepSeek-V3.2-Speciale"
    )
    assert chat.encoder.name == "deepseek-v32-speciale" and "does not render tools" in chat.no_tools
    prompt = chat.encoder.encode([USER], thinking=True)
    assert prompt == encode_deepseek_v32([USER], thinking=True)


def test_arguments_are_a_string_where_the_template_concatenates_them(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'A' + c.function.arguments }}{% endfor %}{%"
        " endfor %}"
    )
    history = [USER, {"role": "assistant", "tool_calls": [call('{"k":1}')]}]
    assert chat_of(tmp_path, source).encoder.encode(history) == 'A{"k":1}'
    tilde = source.replace("'A' +", "'A' ~")
    assert chat_of(tmp_path, tilde).encoder.encode(history) == 'A{"k":1}'


def test_templates_have_what_transformers_gives_them(tmp_path: Path) -> None:
    source = (
        "{% generation %}{{ bos_token }}{% endgeneration %}{{ strftime_now('%Y') | length }}{% for m in messages %}{%"
        " continue %}{% endfor %}"
    )
    assert chat_of(tmp_path, source).encoder.encode([USER]) == BOS + "4"
    refusing = "{{ raise_exception('Only one user!') }}"
    with pytest.raises(InvalidRequest, match="Only one user!"):
        chat_of(tmp_path, refusing).encoder.encode([USER])


@pytest.mark.parametrize(
    "source",
    ["{{ messages.__class__.__mro__ }}", "{{ ''.format.__globals__ }}", "{{ cycler.__init__.__globals__.os }}"],
)
def test_templates_are_sandboxed(tmp_path: Path, source: str) -> None:
    encoder = chat_of(tmp_path, source).encoder
    try:
        assert encoder.encode([USER]) == ""  # what is forbidden is undefined
    except CheckpointError as error:
        assert "sandbox" in str(error)


TOO_MUCH = (
    "{{ 'x' * 8000000000 }}", "{% for i in range(90000) %}{{ 'x' * 90000 }}{% endfor %}", "{{ 9 ** 99999999 }}",
    "{{ 7 * 10 ** 4000 * 10 ** 4000 }}", "{{ '%99999999999d' % 1 }}", "{{ '%*d' % (2000000000, 1) }}",
    "{{ '{:99999999999d}'.format(1) }}", "{{ '{:{}}'.format(1, 2000000000) }}", "{{ 'x'.center(9999999999) }}",
    "{{ 'x' | center(9999999999) }}", "{{ ('x\n' * 10000) | indent(1000000) }}", "{{ [1] * 9999999999 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='xxxxxxxxxx') %}{% for i in range(9) %}{% set n.x = n.x.replace('x', 'x' * 10) %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{{ [1] | tojson(indent=99999999999) }}", "{{ range(99999) | map('string') | join('x' * 99999) }}",
    "{{ ('x' * 99999).join('x' * 99999) }}", "{{ range(9) | batch(9999999999, 0) | list }}",
    "{{ range(9) | slice(9999999999) | list }}", "{{ ('\\t' * 1000).expandtabs(99999999) }}",
    "{{ 'x'.translate({120: 'x' * 100}) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
)  # fmt: skip


@pytest.mark.parametrize("source", TOO_MUCH)
def test_a_template_that_builds_too_much_is_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is read if it always does, else when it renders the messages that make it."""
    monkeypatch.setattr(sandbox, "MAX_SIZE", 1 << 18)
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1 << 13)
    with pytest.raises(
        CheckpointError, match="template renders no short conversation: it (builds|takes|computes|calls)"
    ):
        chat_of(tmp_path, source)
    encoder = chat_of(
        tmp_path, "{% if messages | length > 1 and not messages[1].tool_calls %}" + source + "{% endif %}"
    ).encoder
    assert encoder.encode([USER]) == ""
    with pytest.raises(InvalidRequest, match="messages: the model's chat template fails on them: it"):
        encoder.encode([USER, {"role": "assistant", "content": "a"}])


def test_limits_of_templates_leave_room_for_what_they_do(tmp_path: Path) -> None:
    source = (
        "{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x ~ m.role + ': ' + m.content | trim %}{% endfor %}"
        "{{ n.x | length }} {{ 1732400000 | string }} {{ '%d' % 1732400000 }} {{ '{}'.format(1732400000) }}"
        " {{ tools | tojson(indent=4) | length > 100 }} {{ [1, 2] | join(', ') }} {{ 2 ** 10 }} {{ 3 * 4 }} {{ 'ab' * 2 }}"
        " {{ 'a\nb' | indent(2) }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    )
    encoder = chat_of(tmp_path, source).encoder
    turns = [USER | {"content": "word " * 2000}, {"role": "assistant", "content": "word " * 2000}] * 20
    size = sum(len(turn["role"]) + 2 + 9999 for turn in turns)
    want = f"{size} 1732400000 1732400000 1732400000 True 1, 2 1024 12 abab a\n  b 20"
    assert encoder.encode(turns, [TOOL]) == want


def test_named_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    encoder = choose_chat(tmp_path, {}).encoder
    assert encoder.encode([USER]) == "D" and encoder.encode([USER], [TOOL]) == "T1"


def test_broken_templates_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not compile"):
        chat_of(tmp_path, "{% if %}")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer_config.json"):
        choose_chat(tmp_path, {})


def test_choice_without_a_template(tmp_path: Path) -> None:
    v3, v32 = {"architectures": ["DeepseekV3ForCausalLM"]}, {"model_type": "deepseek_v32"}
    assert builtin_encoder(v3, "deepseek-ai/DeepSeek-V3") == "deepseek-v3"
    assert builtin_encoder(v3, "DeepSeek-R1") == "deepseek-r1"
    assert builtin_encoder(v3, "DeepSeek-R1-0528") == "deepseek-r1-0528"
    assert builtin_encoder(v3, "DeepSeek-V3.1") == "deepseek-v31"
    assert builtin_encoder(v3, "DeepSeek-V3.1-Terminus") == "deepseek-v31-terminus"
    assert builtin_encoder(v32, "tiny") == "deepseek-v32"
    assert builtin_encoder(v32, "DeepSeek-V3.2-Exp") == "deepseek-v31-terminus"
    assert builtin_encoder({"architectures": ["LlamaForCausalLM"]}, "r1") is None
    chat = choose_chat(tmp_path, v32)
    assert chat.encoder == builtin("deepseek-v32") and chat.formats == ParserNames("deepseek-v3", "deepseekv32")
    assert chat_of(tmp_path, None, "deepseek-r1", **v32).encoder.name == "deepseek-r1"
    base = choose_chat(tmp_path, {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(InvalidRequest, match="no chat template"):
        base.encoder.encode([USER])
    with pytest.raises(UnsupportedConfig, match="no/such.*deepseek-v32"):
        chat_of(tmp_path, None, "no/such")


def test_parsers_are_chosen_by_the_markup_of_the_template() -> None:
    assert formats_of("{% if not thinking is defined %}</think><｜tool▁sep｜>") == ParserNames(
        "deepseek-v3", "deepseekv31"
    )
    assert formats_of("<｜tool▁sep｜>\n```json\n") == ParserNames(None, "deepseekv3")
    assert formats_of("split('</think>')<｜tool▁sep｜>```json<think>\\n") == ParserNames("deepseek-r1", "deepseekv3")
