"""Builds the events of one answer from what the layers of a parser read. Markup without meaning becomes text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from thalweg.text.events import Event, Part, PartKind
from thalweg.text.lexer import Token
from thalweg.text.partial_json import PartialJson, words_after_json

Schemas = Mapping[str, Mapping[str, object]]  # function name → schema of its parameters


class TextSpacing:
    """Text around blocks of markup: the blank line before a block and the space after it belong to neither.

    Up to two newlines at the end are held until more text or a block follows; space after a block until text follows.
    """

    __slots__ = ("_after", "_before", "_held", "after_block")

    def __init__(self, after_block: bool = False) -> None:
        self._held = ""
        self._after: list[str] = []  # space since the last block
        self._before = ""  # the blank line before a block that may turn out to be text
        self.after_block = after_block  # only space came since the beginning or the last block

    def feed(self, text: str) -> str:
        if self.after_block and text.isspace():
            self._after.append(text)
            return ""
        if self.after_block:
            text = "".join((self._before, *self._after, text))
            self.after_block, self._before = False, ""
            self._after.clear()
        text = self._held + text
        shown = max(len(text.rstrip("\n")), len(text) - 2)
        self._held = text[shown:]
        return text[:shown]

    def cut(self) -> None:
        """Markup begins or ends here."""
        if not self.after_block:
            self._before = self._held
        self._held = ""
        self._after.clear()
        self.after_block = True

    def confirm(self) -> None:
        """The markup was a call: the blank line before it is dropped."""
        self._before = ""

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class EventBuilder:
    """The answer so far, as events. hold: a call appears only when it has ended, so a malformed one never does."""

    def __init__(self, hold: bool, new_id: Callable[[], str]) -> None:
        self.hold = hold
        self.parts: list[Part] = []
        self._events: list[Event] = []
        self._open: Part | None = None
        self._new_id = new_id
        self._calls = 0
        self._spacing = TextSpacing()

    def drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        self._add(PartKind.REASONING, text)

    def text(self, text: str) -> None:
        """Content."""
        if text:
            self._add(PartKind.TEXT, self._spacing.feed(text))

    def cut(self) -> None:
        """A call, or a block of calls, begins or ends in the content."""
        self._spacing.cut()

    def finish(self) -> None:
        self._add(PartKind.TEXT, self._spacing.finish())
        self.close()

    def start_call(self, name: str, id: str = "") -> Part:
        """id: the model's own, if it writes ids; one that it has used is replaced."""
        self._spacing.confirm()
        id = self._new_id() if id in ("", *(part.id for part in self.parts)) else id
        call = self._begin(Part(PartKind.CALL, len(self.parts), id, name, self._calls))
        self._calls += 1
        return call

    def extend(self, part: Part, text: str) -> None:
        if text:
            part.deltas.append(text)
            self._events.append(Event("delta", part, text))

    def close(self) -> None:
        """Closes the open part, if any."""
        if self._open is not None:
            self._events.append(Event("close", self._open))
            self._open = None

    def _add(self, kind: PartKind, text: str) -> None:
        if text:
            part = self._open
            if part is None or part.kind is not kind:
                part = self._begin(Part(kind, len(self.parts)))
            self.extend(part, text)

    def _begin(self, part: Part) -> Part:
        self.close()
        self._open = part
        self.parts.append(part)
        self._events.append(Event("open", part))
        return part


class CallReader(ABC):
    """Reads one call between its tags. It becomes an event only when its arguments have begun to make sense.

    The arguments are one JSON object, in most formats as it is written.
    """

    def __init__(self, builder: EventBuilder, hold: bool = False) -> None:
        """hold: show this call only when it is complete, whatever the others do."""
        builder.cut()
        self.name = self.id = ""  # id: where the model writes one
        self.raw: list[str] = []  # all text of the call
        self.json = PartialJson()
        self.after: list[str] = []  # text after the JSON object
        self._builder = builder
        self._hold, self._shows_at_end = hold or builder.hold, hold
        self._text_ended = self._is_cut = False
        self._held: list[str] = []  # arguments of a call that is not shown yet
        self._part: Part | None = None  # once it is shown

    def text(self, text: str) -> bool:
        """Takes text of the call. False when the call turned out malformed."""
        self.raw.append(text)
        if self.json.done:
            self.after.append(text)
            return True
        return self.read(text)

    @abstractmethod
    def read(self, text: str) -> bool:
        """The same, before the end of the JSON object."""

    @abstractmethod
    def close(self, ended: bool) -> str:
        """Ends the call, or gives it up. Returns text inside it that is content. ended: the end tag came."""

    def feed_json(self, text: str) -> bool:
        """Takes text of the JSON object."""
        self.pass_on(self.json.feed(text))
        if self.json.done:
            self.after.append(self.json.rest)
            self.json.rest = ""
        return not self.json.bad

    def waiting(self) -> str:
        """Arguments that were read and not passed on."""
        return self.json.held

    @property
    def held(self) -> str:
        return "".join(self._held)

    def pass_on(self, arguments: str) -> None:
        """More of the arguments."""
        if not arguments:
            return
        if self._hold:
            self._held.append(arguments)
            return
        if self._part is None:
            self._part = self._builder.start_call(self.name, self.id)
        self._builder.extend(self._part, arguments)

    def succeed(self) -> str:
        """The call is complete. Returns the words after its arguments."""
        if self._part is None:
            self._builder.extend(self._builder.start_call(self.name, self.id), self.held)
        self._builder.close()
        self._builder.cut()
        return words_after_json("".join(self.after))

    def fail(self, raw: str | None = None, left: str | None = None) -> str:
        """The call is malformed. If it is not shown, `raw`, all its text, is content. Else `left`, the text that was
        not passed on, is content.
        """
        if self._text_ended and self._break_off():
            return "".join(self.after)
        if self._part is None:
            self._builder.text("".join(self.raw) if raw is None else raw)
            return ""
        self._part.complete = False
        self._builder.close()
        self._builder.cut()
        self._builder.text(self.json.held + self.json.rest if left is None else left)
        return ""

    def finish(self, is_cut: bool) -> str:
        """The text ended inside the call. is_cut: at a limit, not where the model ended it. Returns content."""
        self._text_ended, self._is_cut = True, is_cut
        return self.close(ended=False)

    def _break_off(self) -> bool:
        """Ends the call where the text ended: closing its JSON would make other arguments of it. False when it is
        content: a call that must not be shown before its end, or one without arguments that the model gave up.
        """
        has_begun = self._part is not None or bool(self._held)
        if self._shows_at_end or not (has_begun or self._is_cut):
            return False
        if has_begun or self.name:
            if self._part is None:
                self._part = self._builder.start_call(self.name, self.id)
            self._builder.extend(self._part, self.held + self.waiting())
            self._part.complete = False
            self._builder.close()
        return True


class ToolLayer(ABC):
    """Reads the tool calls of one format: takes the tokens of the content, writes to the builder.

    schemas: of the functions' parameters by name; empty when the functions are not known.
    """

    def __init__(self, builder: EventBuilder, schemas: Schemas) -> None:
        self.builder, self.schemas = builder, schemas
        self.call: CallReader | None = None

    @abstractmethod
    def token(self, token: Token) -> None: ...

    def close(self, ended: bool) -> None:
        """Ends the open call, if any."""
        call, self.call = self.call, None
        if call is not None:
            self.builder.text(call.close(ended))

    def finish(self, is_cut: bool) -> None:
        """The text ended. is_cut: at a limit, not where the model ended it."""
        call, self.call = self.call, None
        if call is not None:
            self.builder.text(call.finish(is_cut))
