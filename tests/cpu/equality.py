"""What "the same tokens" means for comparisons of two greedy outputs.

Outputs are equal up to the first position where the reference was at a near tie: its largest logit led the second by
less than epsilon. Text after a different near tie is not compared. Such differences are counted and must stay rare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

EPSILON = 1e-3  # in logits
RARE = 1e-4  # of the compared positions


@dataclass(slots=True)
class SameTokens:
    """Compares outputs one after another. positions: compared so far. excused: differences at near-ties."""

    epsilon: float = EPSILON
    positions: int = 0
    excused: int = 0

    def difference(self, reference: Sequence[int], margins: Sequence[float], tokens: Sequence[int]) -> str:
        """Why `tokens` is not the same as `reference`, or "". margins: the reference's top-two logit margin at each
        position.
        """
        if len(margins) != len(reference):
            raise ValueError(f"{len(reference)} reference tokens need as many margins, got {len(margins)}")
        for position, (want, got) in enumerate(zip(reference, tokens, strict=False)):
            if want != got and margins[position] < self.epsilon:
                self.positions, self.excused = self.positions + position + 1, self.excused + 1
                return ""
            if want != got:
                return f"token {position} is {got}, the reference says {want} by a margin of {margins[position]:.3g}"
        if len(reference) != len(tokens):
            return f"{len(tokens)} tokens, the reference has {len(reference)}"
        self.positions += len(reference)
        return ""

    @property
    def rare(self) -> bool:
        """Whether excused differences are as rare as near-ties may be; one is always allowed."""
        return self.excused <= max(1, int(RARE * self.positions))
