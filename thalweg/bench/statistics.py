"""Percentiles, confidence intervals of shares, and intervals for the ratio of two measurements."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import NormalDist, fmean, variance

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STEPS = 2000  # of the numerical integral of Student's t


def percentile(values: Sequence[float] | Floats, q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours; nan of no values."""
    return float(np.percentile(values, q)) if len(values) else math.nan


def median(values: Sequence[float] | Floats) -> float:
    """0 of no values."""
    return float(np.median(values)) if len(values) else 0.0


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """The length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, slots=True)
class Share:
    """`hits` of `total`, with Wilson's 95 % interval (JASA 22, 1927), which also holds near 0 and 1."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        if not self.total:
            return 0.0, 1.0
        n, p, z = self.total, self.value, NormalDist().inv_cdf(0.975)
        scale = 1 + z * z / n
        middle = (p + z * z / (2 * n)) / scale
        half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(middle - half, 0.0), min(middle + half, 1.0)

    def as_json(self) -> dict[str, object]:
        low, high = self.interval
        return {"hits": self.hits, "total": self.total, "share": self.value, "low_95": low, "high_95": high}


@dataclass(frozen=True, slots=True)
class Ratio:
    """B / A with its interval."""

    value: float
    low: float | None = None  # None: nothing measures the noise
    high: float | None = None


def student(confidence: float, freedom: float) -> float:
    """The t below which |t| lies with this confidence, for any degrees of freedom from 1 on.

    With t = sqrt(f) tan(angle), the density in the angle is proportional to cos^(f - 1): it is summed, then inverted.
    """
    if freedom > 1e4:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    width = math.pi / 2 / STEPS
    density = [max(math.cos(step * width), 0.0) ** (freedom - 1) for step in range(STEPS + 1)]
    below = [0.0, *accumulate(before + after for before, after in pairwise(density))]
    wanted = confidence * below[-1]
    step = bisect_left(below, wanted)
    part = (wanted - below[step - 1]) / (below[step] - below[step - 1])
    return math.sqrt(freedom) * math.tan((step - 1 + part) * width)


def _log_ratio(middle: float, half: float) -> Ratio:
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def welch(a: Sequence[float], b: Sequence[float], confidence: float) -> Ratio:
    """From at least two positive repeats of each: Welch's interval of the logarithms' means."""
    logs = [[math.log(value) for value in values] for values in (a, b)]
    parts = [variance(one) / len(one) for one in logs]
    middle, error = fmean(logs[1]) - fmean(logs[0]), math.sqrt(sum(parts))
    if error == 0.0:
        return _log_ratio(middle, 0.0)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(one) - 1) for part, one in zip(parts, logs, strict=True))
    return _log_ratio(middle, student(confidence, max(freedom, 1.0)) * error)


def paired(a: Sequence[float], b: Sequence[float], confidence: float) -> Ratio:
    """From repeats whose i-th ones had the same work: differences between the repeats cancel."""
    logs = [math.log(after / before) for before, after in zip(a, b, strict=True)]
    error = math.sqrt(variance(logs) / len(logs))
    return _log_ratio(fmean(logs), student(confidence, len(logs) - 1) * error)


def share_ratio(a: tuple[int, int], b: tuple[int, int], confidence: float) -> Ratio:
    """From (hits, total) of both: the ratio of two shares, with half a hit added to each (Katz, Walter)."""
    value = (b[0] / b[1]) / max(a[0] / a[1], 1e-12)
    middle = math.log((b[0] + 0.5) / (b[1] + 0.5)) - math.log((a[0] + 0.5) / (a[1] + 0.5))
    spread = sum(1 / (hits + 0.5) - 1 / (total + 0.5) for hits, total in (a, b))
    half = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(max(spread, 0.0))
    return Ratio(value, math.exp(middle - half), math.exp(middle + half))
