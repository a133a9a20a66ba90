"""Decides which part of an answer the prefix cache retains: the part that the next turn's prompt renders again.

Templates differ, also by their arguments: V3.1 and R1 drop every earlier thought; V3.2 and Qwen3 keep those since the
user's last message; some keep all; Qwen3 writes an empty thought before an answer and leaves it out later. So a small
conversation is rendered one turn further, with marked words in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from thalweg.core.errors import CheckpointError, InvalidRequest
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.text.chat import ChatFormat
from thalweg.text.parser import TOOL_FORMATS, is_in_thought

KNOWN = 256  # sets of template arguments whose behavior is kept; beyond it all are forgotten
_THOUGHT, _ANSWER = "thalweg-thought", "thalweg-answer"
_USER = {"role": "user", "content": "q"}
_CALL = {"id": "call000000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_RESULT = {"role": "tool", "content": "r", "tool_call_id": "call000000"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


class TemplateBehavior(NamedTuple):
    """Parts of a turn that a template renders again in the next turn."""

    thoughts: bool  # the thought of an answer
    called: bool  # the thought before a call, when the call's result follows
    plain: bool  # the prompt and the answer, where the prompt leaves the model outside a thought
    plain_called: bool  # the same with a call as the answer


class ThinkingRetention:
    """The retention of each request's answers.

    ChatFormat.strip: False keeps all, None drops what the template drops, True drops thoughts always. mark_id: the id
    of an added token, or None.
    """

    def __init__(self, chat: ChatFormat, mark_id: Callable[[str], int | None]) -> None:
        self._chat = chat
        self._thinks = chat.formats.reasoning is not None and chat.strip is not False
        self._think_id = mark_id("<think>")
        mark = TOOL_FORMATS[chat.formats.tools].mark if chat.formats.tools else ""
        self._call_id = mark_id(mark) if mark else None
        self._behaviors: dict[bytes, TemplateBehavior] = {}

    @property
    def strips(self) -> bool:
        """Whether thoughts of requests without other template arguments are dropped."""
        return self._thinks and (bool(self._chat.strip) or not self._behavior({"thinking": True}).thoughts)

    def keep(self, prompt: str, arguments: Mapping[str, Any] | None, tools: bool) -> CacheRetention:
        """For the answers to `prompt`, rendered with these template arguments. tools: it offers some."""
        if not self._thinks:
            return RETAIN_ALL
        behavior = self._behavior(arguments or {})
        call_id = -1 if self._call_id is None or not tools else self._call_id
        if prompt.rstrip().endswith("</think>"):
            dropped = CacheRetention(False, tool_call_id=call_id if behavior.plain_called else -1)
            return RETAIN_ALL if behavior.plain else dropped
        start_id = -1 if is_in_thought(prompt) else self._think_id
        if start_id is None or (behavior.thoughts and not self._chat.strip):
            return RETAIN_ALL
        return CacheRetention(False, start_id, call_id if behavior.called else -1)

    def _behavior(self, arguments: Mapping[str, Any]) -> TemplateBehavior:
        key = hashlib.blake2b(json.dumps(arguments, sort_keys=True, default=repr).encode("utf-8", "replace")).digest()
        if key not in self._behaviors:
            if len(self._behaviors) >= KNOWN:
                self._behaviors.clear()
            self._behaviors[key] = self._probe(arguments)
        return self._behaviors[key]

    def _probe(self, arguments: Mapping[str, Any]) -> TemplateBehavior:
        def render(*messages: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
            try:
                return self._chat.encoder.encode((_USER, *messages), tools, template_kwargs=arguments)
            except (InvalidRequest, CheckpointError):
                return None  # the template does not accept such a turn

        answer = {"role": "assistant", "content": _ANSWER}
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        thought = {"reasoning_content": _THOUGHT}
        prompt, with_tools = render(), render(tools=(_TOOL,))
        answered, called = render(answer, _USER), render(call, _RESULT, tools=(_TOOL,))
        return TemplateBehavior(
            thoughts=_THOUGHT in (render(answer | thought, _USER) or ""),
            called=_THOUGHT in (render(call | thought, _RESULT, tools=(_TOOL,)) or ""),
            plain=prompt is not None and (answered or "").startswith(prompt),
            plain_called=with_tools is not None and (called or "").startswith(with_tools),
        )
