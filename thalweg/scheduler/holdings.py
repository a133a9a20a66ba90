"""What requests hold: slots, page leases, and their place in the prefix cache."""

from __future__ import annotations

from typing import Sequence

from thalweg.cache.books import Books
from thalweg.cache.radix import Frontier, Path
from thalweg.core.request import Exit, Request
from thalweg.core.ticket import Ticket, Tier


class Holdings:
    """Slots and pages of one rank. Every request between `enter` and `leave` has a `Path`; a seated one has a slot and
    pages too.
    """

    def __init__(self, slots: int, books: Books, tier: Tier) -> None:
        self.books, self.tree, self.tier = books, books.tree, tier
        self.page = books.page_size
        self.slots = list(range(slots - 1, -1, -1))  # the free ones
        self.paths: dict[int, Path] = {}
        self.parked: set[int] = set()  # those who left in the cache what may not last

    def enter(self, r: Request) -> None:
        """`r` begins to wait."""
        self.paths[r.uid] = Path(r.tokens, r.salt)

    def leave(self, r: Request) -> None:
        """`r` holds nothing any more. What it left in the cache for itself alone, when it was preempted, or computed
        wrong, goes.
        """
        path = self.paths.pop(r.uid)
        if r.uid in self.parked:
            self.parked.remove(r.uid)
            self.books.trim(path, self.lasting(r) // self.page)

    def learn(self, r: Request, tokens: Sequence[int]) -> None:
        """`tokens` follow what is known of `r`."""
        r.out.extend(tokens)
        self.paths[r.uid].tokens.extend(tokens)

    def hit(self, r: Request) -> int:
        """How many pages of a waiting request are cached and of use."""
        return self.tree.match(self.paths[r.uid], self.useful(r))

    def useful(self, r: Request) -> int:
        """The most pages that a hit of `r` may have: the last token must be computed, as its logits make the next one,
        and so must the token before each prompt token whose logprob is still wanted.
        """
        unscored = r.score_from - 1 + len(r.scores)
        most = r.known - 1
        if unscored < len(r.prompt) - 1:
            most = min(most, unscored)
        return most // self.page

    def frontier(self, r: Request) -> Frontier | None:
        return self.tree.frontier(self.paths[r.uid])

    def seat(self, r: Request, upto: int, reserve: int) -> Ticket | None:
        """Gives `r` a slot, its cached pages and more for `upto` tokens in all, and asks the tier for what is not
        cached.

        None, and nothing happens, if fewer than `reserve` pages would be left to those that run.
        """
        hit = self.hit(r)
        need = -(-upto // self.page) - hit
        if need + reserve > self.books.spare():
            return None
        cached = self.tree.pages(self.paths[r.uid])
        self.books.hold(cached)
        if need + reserve > self.books.spare():  # some of the hit were idle, hence spare, themselves
            self.books.drop(cached)
            return None
        r.pages = cached + self.books.take(need)
        r.slot = self.slots.pop()
        r.computed = hit * self.page
        most = self.useful(r)
        return self.tier.load(self.paths[r.uid].tokens[: most * self.page], r.salt, hit, r.pages[hit:most])

    def short(self, r: Request, upto: int) -> int:
        """Pages that `r` lacks for `upto` tokens."""
        return max(0, -(-upto // self.page) - len(r.pages))

    def grow(self, r: Request, count: int) -> tuple[int, ...]:
        """`count` more pages, at the end of its table."""
        new = self.books.take(count)
        r.pages.extend(new)
        return tuple(new)

    def share(self, r: Request, positions: int) -> None:
        """Caches the full pages among the first `positions` of `r`, as far as they last: their contents are in the
        stream, or final.
        """
        if r.exit is Exit.PREEMPT or r.finish == "error":
            self.parked.add(r.uid)
        self.tree.insert(self.paths[r.uid], r.pages, min(positions, self.lasting(r)) // self.page)

    def lasting(self, r: Request) -> int:
        """How many leading tokens of `r` may be cached now. Who is preempted leaves all it has there, to find it again;
        of who was computed wrong stays what others had computed before.
        """
        if r.finish == "error":
            return r.cached
        if r.exit is not Exit.PREEMPT and r.retention.drops_output(r.out, r.exit is Exit.FINISH):
            return len(r.prompt)
        return r.known

    def stand_up(self, r: Request) -> None:
        """The slot goes home; the pages stay."""
        self.slots.append(r.slot)
        r.slot = -1

    def send(self, r: Request) -> Ticket:
        """Copies the full pages of a finished request elsewhere; they stay leased until the ticket ends."""
        full = (r.known - 1) // self.page
        return self.tier.store(self.paths[r.uid].tokens[: full * self.page], r.salt, r.pages[:full])

    def clear(self, r: Request) -> None:
        """The pages go home."""
        self.books.drop(r.pages)
        r.pages = []
