"""What a sequence's output must match, as a value, and what the scheduler asks of whoever compiles and follows grammars."""

from __future__ import annotations

from typing import NamedTuple, Protocol, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from thalweg.core.errors import InvalidRequest
from thalweg.core.sampling import SamplingParams
from thalweg.core.ticket import Ticket, TicketState

KINDS = ("json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag", "lark")


class Grammar(msgspec.Struct, frozen=True):
    """kind: one of KINDS, "" is no grammar. source: the schema (JSON text), expression or grammar; of a choice, a JSON list of strings.

    A thought comes first and is free: with `inside` the prompt has opened it, else the first token may be `opens`; the grammar holds from the
    token after `closes`. -1: there is no such token, and the grammar holds from the first token on. field: what to name to the user when it is wrong.
    """

    kind: str = ""
    source: str = ""
    inside: bool = False
    opens: int = -1
    closes: int = -1
    field: str = "grammar"

    @property
    def on(self) -> bool:
        return bool(self.kind)

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidRequest for an unknown kind, and for parameters that contradict a grammar."""
        if self.on and self.kind not in KINDS:
            raise InvalidRequest(self.field, f"kind {self.kind!r} is unknown; there is {', '.join(KINDS)}")
        if self.on and params.ignore_eos:
            raise InvalidRequest("ignore_eos", f"contradicts {self.field}: what is complete ends with an end token")


FREE = Grammar()


class Masks(NamedTuple):
    """Of the emitting rows with these indices: one bit a token id, 1 = allowed; int32 [len(rows), ceil(vocabulary / 32)], lowest bit first."""

    rows: tuple[int, ...]
    bits: NDArray[np.int32]


class Grammars(Protocol):
    """Follows one grammar a sequence, from `open` to `close`, by the tokens that are committed."""

    def open(self, uid: int, grammar: Grammar) -> Ticket:
        """Has the grammar compiled, elsewhere. The ticket fails, with the reason, if that cannot be done."""

    def advance(self, uid: int, tokens: Sequence[int]) -> None:
        """These tokens of the sequence are committed."""

    def close(self, uid: int) -> None:
        """The sequence has ended, or never began; forgets one that was never opened, too."""

    def broken(self) -> list[tuple[int, str]]:
        """Sequences whose grammar went beyond its limits since the last call, and why: they cannot go on."""


class NoGrammars:
    """Off is a value: nothing is compiled."""

    def open(self, uid: int, grammar: Grammar) -> Ticket:
        return Ticket(0, TicketState.FAILED, "structured output is not available in this engine")

    def advance(self, uid: int, tokens: Sequence[int]) -> None:
        return

    def close(self, uid: int) -> None:
        return

    def broken(self) -> list[tuple[int, str]]:
        return []
