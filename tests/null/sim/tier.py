"""A slow tier that may fail: a side stream writes at any moment, and leaves garbage when it fails."""

from __future__ import annotations

import random
from typing import Sequence

from tests.null.sim.clock import Clock
from tests.null.sim.device import Device
from tests.null.sim.model import chain
from thalweg.core.ticket import Ticket, TicketState


class SlowTier:
    """fail: the share of loads that fail."""

    def __init__(self, clock: Clock, rng: random.Random, device: Device, fail: float) -> None:
        self.clock, self.rng, self.device, self.fail = clock, rng, device, fail
        self.page = device.page
        self.book: dict[int, list[int]] = {}  # hash at a page's end -> the page's KV

    def put(self, kv: Sequence[int]) -> None:
        """A store, or a prefill peer, has this."""
        for end in range(self.page, len(kv) + 1, self.page):
            self.book[kv[end - 1]] = list(kv[end - self.page : end])

    def load(self, tokens: Sequence[int], salt: int, first: int, pages: Sequence[int]) -> Ticket:
        assert len(tokens) == (first + len(pages)) * self.page, "tokens and pages do not match"
        keys = []
        for key in chain(salt, tokens)[self.page - 1 :: self.page][first:]:
            if key not in self.book:
                break
            keys.append(key)
        ticket = Ticket(len(keys), TicketState.PENDING if keys else TicketState.OK)

        def land() -> None:
            bad = self.rng.random() < self.fail
            for kv in self.device.kv:
                for key, page in zip(keys, pages, strict=False):
                    kv[page * self.page : (page + 1) * self.page] = [-1] * self.page if bad else self.book[key]
            ticket.state = TicketState.FAILED if bad else TicketState.OK

        if keys:
            self.clock.after(self.rng.randint(1, 150), land)
        return ticket

    def store(self, tokens: Sequence[int], salt: int, pages: Sequence[int]) -> Ticket:
        want, pages = chain(salt, tokens), list(pages)
        assert len(tokens) == len(pages) * self.page, "tokens and pages do not match"
        ticket = Ticket(len(pages))

        def land() -> None:
            kv = self.device.kv[-1]
            got = [h for page in pages for h in kv[page * self.page : (page + 1) * self.page]]
            assert got == want, "a page was reused while it was sent"
            self.put(got)
            ticket.state = TicketState.OK

        self.clock.after(self.rng.randint(1, 150), land)
        return ticket
