"""What can be said of a share from a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z_95 = 1.959964  # of the standard normal distribution: 95 % lie within ± this


@dataclass(frozen=True, slots=True)
class Share:
    """`hits` of `total`, with its 95 % confidence interval after Wilson (JASA 22, 1927), which holds near 0 and 1
    too.
    """

    hits: int
    total: int

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        if not self.total:
            return 0.0, 1.0
        n, p, z2 = self.total, self.value, Z_95 * Z_95
        middle = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
        return max(middle - half, 0.0), min(middle + half, 1.0)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} ({low:.1%}–{high:.1%})"

    def as_json(self) -> dict[str, object]:
        low, high = self.interval
        return {"hits": self.hits, "total": self.total, "share": self.value, "low_95": low, "high_95": high}
