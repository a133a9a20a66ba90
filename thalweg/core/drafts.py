"""What became of drafts: counts that a request keeps of its own, and the engine of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import msgspec


class Drafted(msgspec.Struct, frozen=True, array_like=True):
    """verifications: steps that verified drafts of a sequence. drafted: tokens of these; accepted: of these. drafted_at, accepted_at: verifications
    that had a draft 1, 2, ... places behind the known tokens, and those that accepted one there."""

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    @property
    def length(self) -> float | None:
        """Mean tokens that a verification brought; None where there was none."""
        return 1 + self.accepted / self.verifications if self.verifications else None

    @property
    def rate(self) -> float | None:
        """Share of the drafted tokens that were accepted; None where there were none."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def rates_at(self) -> tuple[float, ...]:
        """By place: share of the verifications with a draft there that accepted one there."""
        return tuple(got / of if of else 0.0 for got, of in zip(self.accepted_at, self.drafted_at, strict=True))

    @property
    def histogram(self) -> tuple[int, ...]:
        """Verifications by how many drafts they accepted, from none on."""
        at = (self.verifications, *self.accepted_at, 0)
        return tuple(more - less for more, less in zip(at, at[1:], strict=False))

    def since(self, before: Drafted) -> Drafted:
        """What came after `before`, which was taken of the same counts."""
        drafted_at = _less(self.drafted_at, before.drafted_at)
        deepest = max((place for place, count in enumerate(drafted_at, 1) if count), default=0)
        return Drafted(
            self.verifications - before.verifications,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            drafted_at[:deepest],
            _less(self.accepted_at, before.accepted_at)[:deepest],
        )


@dataclass(slots=True)
class DraftCount:
    """Counts `Drafted`, in a time that does not depend on how many drafts there are. deepest, lengths: verifications by the place of their last
    draft, and by how many they accepted, from none on."""

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    deepest: list[int] = field(default_factory=lambda: [0])
    lengths: list[int] = field(default_factory=lambda: [0])

    def verified(self, drafts: int, deepest: int, accepted: int) -> None:
        """A verification came back. drafts: tokens it had, at least one; deepest: places behind the known tokens of the last of them."""
        self.verifications += 1
        self.drafted += drafts
        self.accepted += accepted
        missing = deepest + 1 - len(self.deepest)
        if missing > 0:
            self.deepest += [0] * missing
            self.lengths += [0] * missing
        self.deepest[deepest] += 1
        self.lengths[accepted] += 1

    @property
    def drafted_at(self) -> tuple[int, ...]:
        """As of `Drafted`, like the next."""
        return _from_each_on(self.deepest)

    @property
    def accepted_at(self) -> tuple[int, ...]:
        return _from_each_on(self.lengths)

    @property
    def told(self) -> Drafted | None:
        """As of now; None where nothing was verified."""
        if not self.verifications:
            return None
        return Drafted(self.verifications, self.drafted, self.accepted, self.drafted_at, self.accepted_at)


def _from_each_on(counts: list[int]) -> tuple[int, ...]:
    """How many there are from each number on, from 1."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]


def _less(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(count - (before[i] if i < len(before) else 0) for i, count in enumerate(now))
