"""A ticket stands for a transfer under way: from a host tier, an external store or a prefill peer. One mechanism for all."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol, Sequence


class TicketState(enum.Enum):
    PENDING = "pending"
    OK = "ok"
    FAILED = "failed"


@dataclass(slots=True)
class Ticket:
    """`pages` full pages are (or were to be) transferred. Whoever transfers sets `state` once; it must end, if need be by
    timing out to FAILED, because the pages stay leased until then."""

    pages: int
    state: TicketState = TicketState.PENDING
    why: str = ""  # it failed


class Tier(Protocol):
    """A place beyond the device that may hold pages of a prefix."""

    def load(self, tokens: Sequence[int], salt: int, first: int, pages: Sequence[int]) -> Ticket:
        """Fetches the full pages of `tokens` from page index `first` on into device pages `pages`, as many as it has."""

    def store(self, tokens: Sequence[int], salt: int, pages: Sequence[int]) -> Ticket:
        """Copies the device pages that hold the full pages of `tokens`."""


class NoTier:
    """Off is a value: a tier that has nothing."""

    def load(self, tokens: Sequence[int], salt: int, first: int, pages: Sequence[int]) -> Ticket:
        return Ticket(0, TicketState.OK)

    def store(self, tokens: Sequence[int], salt: int, pages: Sequence[int]) -> Ticket:
        return Ticket(0, TicketState.OK)
