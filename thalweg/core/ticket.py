"""Tickets: a ticket is a transfer of pages under way, from a host tier, an external store or a prefill peer."""

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
    """State of one transfer. The transferring side sets `state` once; it must time out to FAILED, because the pages
    stay acquired until then.
    """

    pages: int  # full pages to transfer
    state: TicketState = TicketState.PENDING
    error: str = ""  # reason of a failure

    @property
    def is_done(self) -> bool:
        return self.state is not TicketState.PENDING


class Tier(Protocol):
    """A store outside the device that may hold pages of a prefix."""

    def load(self, tokens: Sequence[int], salt: int, first: int, pages: Sequence[int]) -> Ticket:
        """Fetches full pages of `tokens` from page index `first` on into the device pages `pages`; the ticket says how
        many.
        """

    def store(self, tokens: Sequence[int], salt: int, pages: Sequence[int]) -> Ticket:
        """Copies the device pages that hold the full pages of `tokens`."""
