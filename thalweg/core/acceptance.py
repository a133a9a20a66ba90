"""Acceptance statistics of speculative decoding, for one request or for the whole engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import msgspec


class AcceptanceCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of verified drafts. A position is the distance of a draft from the last known token: 1, 2, ..."""

    verifications: int = 0  # steps that verified drafts of a sequence
    drafted: int = 0  # draft tokens that were verified
    accepted: int = 0  # of these, accepted
    drafted_at: tuple[int, ...] = ()  # verifications that had a draft at position 1, 2, ...
    accepted_at: tuple[int, ...] = ()  # verifications that accepted a draft there

    @property
    def mean_length(self) -> float | None:
        """Mean number of tokens that a verification yields; None without verifications."""
        return 1 + self.accepted / self.verifications if self.verifications else None

    @property
    def rate(self) -> float | None:
        """Share of the draft tokens that were accepted; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def rates_at(self) -> tuple[float, ...]:
        """By position: share of the verifications with a draft there that accepted one."""
        return tuple(got / of if of else 0.0 for got, of in zip(self.accepted_at, self.drafted_at, strict=True))

    @property
    def histogram(self) -> tuple[int, ...]:
        """Verifications by the number of drafts that they accepted, from 0 on."""
        at_least = (self.verifications, *self.accepted_at, 0)
        return tuple(count - longer for count, longer in zip(at_least, at_least[1:], strict=False))

    def since(self, before: AcceptanceCounts) -> AcceptanceCounts:
        """The counts that were added after `before`, an earlier value of the same counter."""
        drafted_at = _subtract(self.drafted_at, before.drafted_at)
        last = max((position for position, count in enumerate(drafted_at, 1) if count), default=0)
        return AcceptanceCounts(
            self.verifications - before.verifications,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            drafted_at[:last],
            _subtract(self.accepted_at, before.accepted_at)[:last],
        )


@dataclass(slots=True)
class AcceptanceCounter:
    """Counts verifications. Adding one takes constant time, however many drafts it has."""

    drafted: int = 0
    by_last: list[int] = field(default_factory=list)  # verifications by the position of their last draft
    by_accepted: list[int] = field(default_factory=list)  # verifications by the number of accepted drafts

    def add(self, drafts: int, last: int, accepted: int) -> None:
        """Adds a verification of `drafts` tokens (at least one). last: position of the last one."""
        self.drafted += drafts
        for counts, i in ((self.by_last, last), (self.by_accepted, accepted)):
            counts += [0] * (last + 1 - len(counts))
            counts[i] += 1

    @property
    def counts(self) -> AcceptanceCounts:
        accepted_at = _at_least(self.by_accepted)
        return AcceptanceCounts(sum(self.by_last), self.drafted, sum(accepted_at), _at_least(self.by_last), accepted_at)


def _at_least(counts: list[int]) -> tuple[int, ...]:
    """How many have at least 1, 2, ... of it."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]


def _subtract(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(count - (before[i] if i < len(before) else 0) for i, count in enumerate(now))
