"""A conversation of another API on its way to the messages that every encoder reads, with the fields that errors must
name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from thalweg.core.errors import InvalidRequest


class ChatConversion:
    """The messages as they are written, each with the field that it comes from.

    parameters: what the API calls the schema of a tool, which has no `function` around it. names: of the chat request's
    other fields.
    """

    def __init__(self, parameters: str, names: Mapping[str, str]) -> None:
        self._parameters, self._names = parameters, names
        self.messages: list[dict[str, Any]] = []
        self.fields: list[str] = []

    def add(self, field: str, role: str, **rest: Any) -> None:
        self.messages.append({"role": role, **rest})
        self.fields.append(field)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Inside, an InvalidRequest about the chat request names what the client wrote."""
        try:
            yield
        except InvalidRequest as error:
            raise InvalidRequest(self._source(error.field), error.message) from None

    def _source(self, field: str) -> str:
        if field.startswith("messages["):
            return self.fields[int(field[len("messages[") :].partition("]")[0])]
        head, bracket, rest = field.partition("[")
        if head == "tools":
            return (
                head + bracket + rest.replace(".function.parameters", "." + self._parameters).replace(".function", "")
            )
        known = max((name for name in self._names if f"{field}.".startswith(f"{name}.")), key=len, default="")
        return self._names[known] + field.removeprefix(known) if known else field
