"""Converts a conversation of another API to a chat request, and names the client's fields in errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from thalweg.server.protocol import ChatRequest

_SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "cache_salt",
    "priority",
)


class ChatConversion:
    """parameters: the API's name for the schema of a tool. names: the chat request's fields → the API's."""

    def __init__(self, parameters: str, names: Mapping[str, str]) -> None:
        self._parameters, self._names = parameters, names
        self.messages: list[dict[str, Any]] = []
        self.fields: list[str] = []  # where each message comes from

    def add(self, field: str, role: str, **rest: Any) -> None:
        self.messages.append({"role": role, **rest})
        self.fields.append(field)

    def chat_request(self, body: msgspec.Struct, **different: Any) -> ChatRequest:
        """The chat request with the messages so far. different: the fields that the API spells differently."""
        same = {name: getattr(body, name) for name in _SAME if name in body.__struct_fields__}
        return ChatRequest(messages=self.messages, **same, **different)

    def client_field(self, field: str) -> str:
        """The client's name of a field of the chat request."""
        if field.startswith("messages["):
            return self.fields[int(field[len("messages[") :].partition("]")[0])]
        if field.startswith("tools["):
            return field.replace(".function.parameters", "." + self._parameters).replace(".function", "")
        known = max((name for name in self._names if f"{field}.".startswith(f"{name}.")), key=len, default="")
        return self._names[known] + field.removeprefix(known) if known else field


def tool_call(id: str, name: str, arguments: object) -> dict[str, Any]:
    """A call in an assistant's message. arguments: an object, or its JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(**function: Any) -> dict[str, Any]:
    """A tool of a chat request. Fields that are None are left out."""
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
