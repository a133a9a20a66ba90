"""Which answers the next turn's prompt renders again, token for token, and which it cuts short: what of them is worth
caching.

Templates differ (V3.1 and R1 drop every earlier thought; V3.2 and Qwen3 keep those since the user's last message, so
that the thought before a tool call stands before its results; some keep all; Qwen3 writes an empty thought before an
answer and leaves it out later), and by the request's template arguments. So they are asked: a small conversation is
rendered one turn further, with marked words in it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.core.errors import CheckpointError, InvalidRequest
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.text.chat import ChatFormat
from thalweg.text.parser import opens_thought

TOOL_CALL_TOKENS = {  # by tool parser: the token that every call has
    "deepseekv3": "<｜tool▁calls▁begin｜>",
    "deepseekv31": "<｜tool▁calls▁begin｜>",
    "deepseekv32": "｜DSML｜",
    "qwen25": "<tool_call>",
}
KNOWN = 256  # sets of template arguments whose habits are kept
_THOUGHT, _ANSWER = "thalweg-thought", "thalweg-answer"
_USER = {"role": "user", "content": "q"}
_CALL = {"id": "call000000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_RESULT = {"role": "tool", "content": "r", "tool_call_id": "call000000"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class TemplateBehavior:
    """What a template renders again in the next turn. thoughts: an answer's; called: the thought before a call, with
    the call's result next. plain, plain_called: the prompt itself and what follows it, where it leaves the model
    outside a thought.
    """

    thoughts: bool
    called: bool
    plain: bool
    plain_called: bool


class ThinkingRetention:
    """Says of each prompt what the cache should keep of its answers. strip of the chat: False keeps all, None drops
    what the template drops, True drops thoughts even where it does not. mark_id: the id of an added token by its text,
    or None.
    """

    def __init__(self, chat: ChatFormat, mark_id: Callable[[str], int | None]) -> None:
        self._chat = chat
        self._thinks = chat.formats.reasoning is not None and chat.strip is not False
        self._think = mark_id("<think>")
        mark = TOOL_CALL_TOKENS.get(chat.formats.tools or "")
        self._call = None if mark is None else mark_id(mark)
        self._habits: OrderedDict[bytes, TemplateBehavior] = OrderedDict()

    @property
    def strips(self) -> bool:
        """Whether any thoughts are left out of the cache, of requests that think and give no other template
        arguments.
        """
        return self._thinks and (bool(self._chat.strip) or not self._of({"thinking": True}).thoughts)

    def keep(self, prompt: str, arguments: Mapping[str, Any] | None, tools: bool) -> CacheRetention:
        """For the answers to `prompt`, which was rendered with these template arguments. tools: whether it offers
        some.
        """
        if not self._thinks:
            return RETAIN_ALL
        habits = self._of(arguments or {})
        call = -1 if self._call is None or not tools else self._call
        drops = bool(self._chat.strip) or not habits.thoughts
        if prompt.rstrip().endswith("</think>"):
            return (
                RETAIN_ALL if habits.plain else CacheRetention(False, tool_call_id=call if habits.plain_called else -1)
            )
        opens = -1 if opens_thought(prompt) else self._think
        if not drops or opens is None:
            return RETAIN_ALL
        return CacheRetention(False, opens, call if habits.called else -1)

    def _of(self, arguments: Mapping[str, Any]) -> TemplateBehavior:
        key = hashlib.blake2b(json.dumps(arguments, sort_keys=True, default=repr).encode("utf-8", "replace")).digest()
        if key in self._habits:
            self._habits.move_to_end(key)
        else:
            self._habits[key] = self._ask(arguments)
            if len(self._habits) > KNOWN:
                self._habits.popitem(last=False)
        return self._habits[key]

    def _ask(self, arguments: Mapping[str, Any]) -> TemplateBehavior:
        def rendered(*messages: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
            try:
                return self._chat.encoder.encode((_USER, *messages), tools, template_kwargs=arguments)
            except (InvalidRequest, CheckpointError):
                return None  # such a turn will not come

        answer = {"role": "assistant", "content": _ANSWER}
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        thought = {"reasoning_content": _THOUGHT}
        asked, offered = rendered(), rendered(tools=(_TOOL,))
        plain, plain_called = rendered(answer, _USER), rendered(call, _RESULT, tools=(_TOOL,))
        return TemplateBehavior(
            thoughts=_THOUGHT in (rendered(answer | thought, _USER) or ""),
            called=_THOUGHT in (rendered(call | thought, _RESULT, tools=(_TOOL,)) or ""),
            plain=asked is not None and plain is not None and plain.startswith(asked),
            plain_called=offered is not None and plain_called is not None and plain_called.startswith(offered),
        )
