"""`thalweg render`: what a model would read of a conversation, as text and as token ids. No weights, no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.config.args import OptionsParser
from thalweg.core.errors import InvalidRequest, UnsupportedConfig
from thalweg.launch.hub import locate
from thalweg.launch.jsonfile import read_json, run_cases, write_line
from thalweg.text.chat import (
    BUILTIN_ENCODERS,
    ChatEncoder,
    ChatFormat,
    ChatOptions,
    builtin,
    builtin_encoder,
    choose_chat,
)
from thalweg.text.tokenizer import Tokenizer

EPILOG = f"""\
FILE is JSON, - is standard input: a list of messages, or an object with messages and optionally tools, thinking,
drop_thinking, add_generation_prompt, continue_final_message, response_format, chat_template_kwargs.
MODEL is a folder or org/name on the hub. Without one there are no token ids, and --chat-template names the encoder:
{", ".join(BUILTIN_ENCODERS)}, or a Jinja file.

examples:
  thalweg render models/tiny conversation.json
  echo '[{{"role": "user", "content": "Hello"}}]' | thalweg render models/tiny -
  thalweg render --chat-template deepseek-v32 conversation.json --thinking
  thalweg render --cases golden.json"""

_FIELDS = {
    "thinking": bool,
    "drop_thinking": bool,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
    "response_format": dict,
    "chat_template_kwargs": dict,
}


@dataclass(frozen=True, slots=True)
class Reader:
    """tokenizer: None when no model was given."""

    chat: ChatFormat
    tokenizer: Tokenizer | None


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 when a case failed. Raises UnsupportedConfig, CheckpointError, InvalidRequest naming the
    message.
    """
    found = _parser().parse_args(list(argv))
    if found.cases is not None:
        return _render_cases(found)
    if not found.words or len(found.words) > 2:
        raise UnsupportedConfig("give [MODEL] and a FILE of messages, or --cases FILE; thalweg render --help shows how")
    model = found.words[0] if len(found.words) == 2 else None
    if model is None and found.chat_template is None:
        raise UnsupportedConfig(
            "give the model before the file, or --chat-template with one of " + ", ".join(BUILTIN_ENCODERS)
        )
    reader = _reader(model, found.chat_template, found.revision)
    given = read_json(found.words[-1])
    conversation = given if isinstance(given, dict) else {"messages": given}
    if found.thinking:
        conversation = {**conversation, "thinking": True}
    if conversation.get("tools") and (why := reader.chat.no_tools):
        raise InvalidRequest("tools", why)
    prompt = render(reader.chat.encoder, conversation)
    ids = None if reader.tokenizer is None else reader.tokenizer.encode(prompt)
    if found.json:
        write_line({"encoder": reader.chat.encoder.name, "prompt": prompt, "tokens": ids})
        return 0
    print(f"encoder {reader.chat.encoder.name}: {reader.chat.reason}", file=sys.stderr)
    print(prompt)
    if ids is not None:
        print(f"\n{len(ids)} tokens\n{ids}")
    return 0


def render(encoder: ChatEncoder, conversation: Mapping[str, Any]) -> str:
    """The prompt of a conversation as JSON has it; null is "not given". Raises InvalidRequest naming message and
    field.
    """
    if "messages" not in conversation:
        raise InvalidRequest("messages", "is required")
    said = {name: conversation[name] for name in _FIELDS if conversation.get(name) is not None}
    for name, value in said.items():
        if not isinstance(value, _FIELDS[name]):
            raise InvalidRequest(name, f"must be {'true or false' if _FIELDS[name] is bool else 'an object'}")
    kwargs = said.pop("chat_template_kwargs", None)
    return encoder.encode(conversation["messages"], conversation.get("tools") or None, template_kwargs=kwargs, **said)


def encoder_of(release: str) -> str:
    """Our encoder for a release by its name (`V3.1`, `DeepSeek-R1-0528`). Raises UnsupportedConfig."""
    lower = release.lower()
    if not any(mark in lower for mark in ("v3", "r1")):
        raise UnsupportedConfig(f"no encoder of ours is for {release!r}: give the model, or --chat-template")
    architecture = "DeepseekV32ForCausalLM" if "v3.2" in lower else "DeepseekV3ForCausalLM"
    name = builtin_encoder({"architectures": [architecture]}, release)
    assert name is not None, "both architectures have encoders"
    return name


def _render_cases(found: argparse.Namespace) -> int:
    """Renders each case with the given encoder, else with that of the release that the case names."""
    if len(found.words) > 1:
        raise UnsupportedConfig(f"unexpected {found.words[1]!r}: --cases names the file")
    model = found.words[0] if found.words else None
    is_asked = model is not None or found.chat_template is not None
    reader = _reader(model, found.chat_template, found.revision) if is_asked else None

    def prompt(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
        encoder = reader.chat.encoder if reader else builtin(encoder_of(str(case.get("model"))))
        yield {"prompt": render(encoder, case)}

    return run_cases(found.cases, prompt)


def _reader(model: str | None, template: str | None, revision: str | None) -> Reader:
    if model is None:
        return Reader(choose_chat(Path(), {}, ChatOptions(template or "")), None)
    folder = locate(model, revision).folder
    tokenizer = Tokenizer(folder)
    config = read_json(str(folder / "config.json"))
    return Reader(
        choose_chat(folder, config, ChatOptions(template or "auto", tokenizer.special_tokens), model), tokenizer
    )


def _parser() -> OptionsParser:
    parser = OptionsParser(
        "thalweg render",
        "The exact prompt that a model gets for a conversation, and its token ids.",
        EPILOG,
        "thalweg render [MODEL] FILE [--flag value ...]\n       thalweg render [MODEL] --cases FILE",
    )
    parser.add_argument("words", nargs="*", metavar="[MODEL] FILE", help=argparse.SUPPRESS)
    parser.add_argument("--chat-template", metavar="NAME|FILE", help="another encoder than the checkpoint's")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a model on the hub")
    parser.add_argument("--thinking", action="store_true", help="ask for a thought before the answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object: encoder, prompt, tokens")
    parser.add_argument(
        "--cases", metavar="FILE", help="golden file; prints a JSON object a line for each case: id, prompt"
    )
    return parser
