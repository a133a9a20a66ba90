"""Tool calls whose arguments are written as JSON.

DeepSeek V3, R1 (a fenced block) and V3.1, V3.2-Exp (bare JSON):

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\nARGS\\n```<｜tool▁call▁end｜>…
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>

A call without the outer tags counts, and so does one without its end tag, if its JSON is complete.

Qwen2.5 and Qwen3 (the Hermes format):

    <tool_call>
    {"name": "F", "arguments": {…}}
    </tool_call>

Written in this order the arguments stream; in any other the call waits for its end tag. Arguments may be a string that
holds JSON.

Kimi-K2, whose ids must come back as the model wrote them:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>…

Llama 3.1, where a call is an answer, or the rest of one behind `<|python_tag|>`, and several are joined with `;`:

    {"name": "F", "parameters": {…}}
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod

import msgspec

from thalweg.text.event_builder import CallReader, EventBuilder, Schemas, ToolLayer
from thalweg.text.lexer import Tag, Token, literal_tags
from thalweg.text.partial_json import whole_object

# Models also write ASCII bars and underscores.
SEP_TAGS = literal_tags(
    {
        "<｜tool▁calls▁begin｜>": "calls",
        "<｜tool▁calls▁end｜>": "/calls",
        "<｜tool▁call▁begin｜>": "call",
        "<｜tool▁call▁end｜>": "/call",
        "<｜tool▁sep｜>": "sep",
    },
    fold={ord("|"): ord("｜"), ord("_"): ord("▁")},
)
KIMI_TAGS = literal_tags(
    {
        "<|tool_calls_section_begin|>": "calls",
        "<|tool_calls_section_end|>": "/calls",
        "<|tool_call_begin|>": "call",
        "<|tool_call_end|>": "/call",
        "<|tool_call_argument_begin|>": "sep",
    }
)
LLAMA_TAGS = literal_tags({"<|python_tag|>": "calls"})
_KIMI_ID = re.compile(r"(?:functions\.)?([^\s<>{}:]{1,256})(?::\d+)?")
HERMES_TAGS = literal_tags({"<tool_call>": "call", "</tool_call>": "/call"})
_BEFORE_JSON = re.compile(r"\s*([^\s`<>{}]*)\s*(?:```(?:json)?)?\s*(?:```)?\s*")
_NAME = re.compile(r"[^\s`<>{}]{1,256}")
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEAD = 4096  # characters before the arguments


class _JsonTools(ToolLayer):
    def token(self, token: Token) -> None:
        if isinstance(token, Tag):
            self.tag(token)
        elif self.call is None:
            self.builder.text(token)
        elif not self.call.text(token):
            self.close(ended=False)

    @abstractmethod
    def tag(self, tag: Tag) -> None: ...


class SepTools(_JsonTools):
    """DeepSeek V3 to V3.2-Exp."""

    reader: type[_SepCall]

    def tag(self, tag: Tag) -> None:
        if tag.kind == "sep" and isinstance(self.call, _SepCall) and not self.call.separated:
            self.call.separated = True
            return
        self.close(ended=True)
        if tag.kind == "call":
            self.call = self.reader(self.builder)
        elif tag.kind in ("calls", "/calls"):
            self.builder.cut()


class _SepCall(CallReader):
    def __init__(self, builder: EventBuilder) -> None:
        super().__init__(builder)
        self.separated = False  # the separator came
        self._header = ""  # before the separator
        self._before = ""  # between the separator and the JSON: the name and the fence of V3

    def read(self, text: str) -> bool:
        if not self.separated:
            self._header += text
            return len(self._header) <= _MAX_HEAD
        if not self.name:
            self._before += text
            at = self._before.find("{", 0, _MAX_HEAD)
            if at < 0:
                return len(self._before) < _MAX_HEAD
            name = self._parsed_name(self._before[:at])
            if name is None:
                return False
            self.name, text = name, self._before[at:]
        return self.feed_json(text)

    def close(self, ended: bool) -> str:
        if self.json.done:
            return self.succeed()
        name = self._parsed_name(self._before) if self.separated and not self.name else None
        if not ended or not name:
            return self.fail()
        self.name = name
        self.pass_on("{}")
        return self.succeed()

    def _parsed_name(self, before: str) -> str | None:
        """V3.1 puts the name before the separator; V3 writes `function` there and the name after it."""
        match, header = _BEFORE_JSON.fullmatch(before), self._header.strip()
        if match is None or (match[1] and header not in ("function", "")):
            return None
        name = match[1] or header
        return name if _NAME.fullmatch(name) else None


class _KimiCall(_SepCall):
    def _parsed_name(self, before: str) -> str | None:
        self.id = self._header.strip()
        match = _KIMI_ID.fullmatch(self.id)
        return match[1] if match and not before.strip() else None


SepTools.reader = _SepCall


class KimiTools(SepTools):
    """Kimi-K2."""

    reader = _KimiCall


class HermesTools(_JsonTools):
    """Qwen2.5 and Qwen3."""

    def tag(self, tag: Tag) -> None:
        self.close(ended=True)
        if tag.kind == "call":
            self.call = _HermesCall(self.builder)


class _HermesCall(CallReader):
    def __init__(self, builder: EventBuilder) -> None:
        super().__init__(builder)
        self._head = ""  # text that may hold the name

    def read(self, text: str) -> bool:
        if not self.name:
            if len(self._head) >= _MAX_HEAD:  # each piece matches the head again: from here on, wait for the end
                return True
            self._head += text
            if self._head.lstrip()[:1] not in ("", "{"):
                return False
            head = _HEAD.match(self._head, 0, _MAX_HEAD)
            name = None if head is None else _json_name(head[1])
            if head is None or name is None:
                return True
            self.name, text = name, self._head[head.end() :]
        return self.feed_json(text)

    def close(self, ended: bool) -> str:
        if self.json.done:
            return self.succeed()
        whole = None if self.name else _whole_call("".join(self.raw))
        if whole is None:
            return self.fail()
        self.name, arguments = whole
        self.pass_on(arguments)
        return self.succeed()


class LlamaTools(_JsonTools):
    """Llama 3.1."""

    def __init__(self, builder: EventBuilder, schemas: Schemas) -> None:
        super().__init__(builder, schemas)
        self._before: list[str] | None = []  # what came where a call may begin; None: text came

    def tag(self, tag: Tag) -> None:
        self.close(ended=True)
        self.builder.cut()
        self._before = []

    def token(self, token: Token) -> None:
        if isinstance(token, Tag):
            return self.tag(token)
        while token:
            if self.call is None and self._before is not None:
                token = self._begin(self._before, token)
            elif self.call is None:
                self.builder.text(token)
                return
            else:
                token = self._more(self.call, token)

    def finish(self, is_cut: bool) -> None:
        super().finish(is_cut)
        if self._before and not self.builder.parts:
            self.builder.text("".join(self._before))

    def _begin(self, before: list[str], text: str) -> str:
        """Where a call may begin. Returns the text that is left to read."""
        rest = text.lstrip("; \t\r\n" if self.builder.parts else None)
        before.append(text[: len(text) - len(rest)])
        if rest.startswith("{"):
            self.call = _LlamaCall(self.builder)
            self.call.raw += before  # content with the rest, if this is no call
        elif rest:
            self._before, rest = None, "".join(before) + rest
        return rest

    def _more(self, call: CallReader, text: str) -> str:
        """Text of a call, or behind it."""
        if not call.text(text):
            self.close(ended=False)
            self._before = None
        rest = "".join(call.after).lstrip()
        if not call.json.done or not rest.startswith("}"):
            return ""
        call.after.clear()
        self.close(ended=True)
        self._before = []
        return rest[1:]


class _LlamaCall(_HermesCall):
    def read(self, text: str) -> bool:
        head = re.sub(r"\s", "", self._head + text)[:8]
        if not self.name and not any(begin.startswith(head) for begin in ('{"name":', '{"type":')):
            return False
        return super().read(text)


def _json_name(literal: str | bytes) -> str | None:
    try:
        name = json.loads(literal)
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call with its keys in any order; None when it is not one JSON object."""
    try:
        members = msgspec.json.decode(whole_object(text), type=dict[str, msgspec.Raw])
        arguments = bytes(members.get("arguments", members.get("parameters", b"{}"))).decode()
        arguments = json.loads(arguments) if arguments.startswith('"') else arguments
        arguments = whole_object("{}" if arguments in ("", "null") else arguments)
        name = _json_name(bytes(members["name"]))
    except (ValueError, KeyError, msgspec.DecodeError):
        return None
    return None if name is None else (name, arguments)
