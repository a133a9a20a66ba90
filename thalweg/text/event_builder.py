"""Where the layers of a parser put what they understood; it becomes events here, and markup that means nothing becomes
text.
"""

from __future__ import annotations

from collections.abc import Callable

from thalweg.text.events import ArgumentDelta, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta


class TextSpacing:
    """Text around blocks of markup: the blank line before a block and the space after it belong to neither.

    Up to two newlines at the end are held until it is known what follows; space after a block until text follows.
    """

    __slots__ = ("_blank", "_held", "_skips", "_spaces")

    def __init__(self, skips_space: bool = False) -> None:
        self._held = ""
        self._spaces: list[str] = []  # after a block, until text follows
        self._blank = ""  # the blank line before a block that has not proved itself yet
        self._skips = skips_space

    @property
    def empty(self) -> bool:
        """Nothing but space since the beginning or the last block."""
        return self._skips

    def feed(self, text: str) -> str:
        if self._skips and text.isspace():
            self._spaces.append(text)
            return ""
        if self._skips:
            text = "".join((self._blank, *self._spaces, text))
            self._skips, self._blank = False, ""
            self._spaces.clear()
        text = self._held + text
        body = text.rstrip("\n")
        shown = max(len(body), len(text) - 2)
        self._held = text[shown:]
        return text[:shown]

    def cut(self) -> None:
        """Markup begins or ends here."""
        if not self._skips:
            self._blank = self._held
        self._held = ""
        self._spaces.clear()
        self._skips = True

    def proved(self) -> None:
        """The markup was a good call: the blank line before it is gone for good."""
        self._blank = ""

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class EventBuilder:
    """The message so far, as events. hold: a call appears only when it is complete, so a malformed one never does."""

    def __init__(self, hold: bool, new_id: Callable[[], str]) -> None:
        self.hold = hold
        self.events: list[Event] = []
        self._new_id = new_id
        self._calls = 0
        self._prose = TextSpacing()

    def drain(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def reasoning(self, text: str) -> None:
        if text:
            self.events.append(ReasoningDelta(text))

    def text(self, text: str) -> None:
        """Content."""
        if text:
            self._content(self._prose.feed(text))

    def cut(self) -> None:
        """A block of tool calls, or a call, begins or ends in the content."""
        self._prose.cut()

    def finish(self) -> None:
        self._content(self._prose.finish())

    def call(self, hold: bool = False) -> CallBuilder:
        """A call begins. hold: show this one only when it is complete, whatever the others do."""
        self.cut()
        return CallBuilder(self, self.hold or hold)

    def started(self, name: str) -> int:
        index = self._calls
        self._calls += 1
        self._prose.proved()
        self.events.append(CallStart(index, self._new_id(), name))
        return index

    def _content(self, text: str) -> None:
        if text:
            self.events.append(ContentDelta(text))


class CallBuilder:
    """One call being read. Its start is an event only once its arguments have begun to make sense."""

    __slots__ = ("_answer", "_held", "_hold", "_index")

    def __init__(self, answer: EventBuilder, hold: bool) -> None:
        self._answer = answer
        self._hold = hold
        self._held: list[str] = []
        self._index: int | None = None

    @property
    def held(self) -> str:
        """The arguments so far of a call that is not shown yet."""
        return "".join(self._held)

    def arguments(self, name: str, text: str) -> None:
        """More of the arguments: text that can be closed into valid JSON."""
        if not text:
            return
        if self._hold:
            self._held.append(text)
            return
        if self._index is None:
            self._index = self._answer.started(name)
        self._answer.events.append(ArgumentDelta(self._index, text))

    def end(self, name: str) -> None:
        """The call is complete."""
        if self._index is None:
            self._index = self._answer.started(name)
            self._answer.events.append(ArgumentDelta(self._index, self.held))
        self._answer.events.append(CallEnd(self._index))
        self._answer.cut()

    def fail(self, closing: str, raw: str, left: str) -> None:
        """The call is malformed or broken off.

        Not started: `raw`, all its text, is content. Started: the arguments end with `closing`, and `left`, the text
        not passed on, is content.
        """
        if self._index is None:
            self._answer.text(raw)
            return
        self._answer.events.append(ArgumentDelta(self._index, closing))
        self._answer.events.append(CallEnd(self._index, whole=False))
        self._answer.cut()
        self._answer.text(left)
