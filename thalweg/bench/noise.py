"""How far two measurements differ, and how far they would by chance: intervals for the ratio of B to A."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESAMPLES = 2000
BLOCKS = 8  # at least so many seconds of a series make an interval
SLICES = 2000  # of the integral under Student's t


@dataclass(frozen=True, slots=True)
class Ratio:
    """value: B / A. low, high: the interval that holds it with the confidence asked for; None where nothing tells the
    noise. how: it was found.
    """

    value: float
    low: float | None = None
    high: float | None = None
    how: str = "one value each, noise unknown"


def student(confidence: float, freedom: float) -> float:
    """The t below which |t| lies with this confidence, for any degrees of freedom from 1 on.

    The density in θ with t = sqrt(f) tan θ is proportional to cos^(f - 1) θ, smooth on a bounded range: summed, then
    inverted.
    """
    if freedom > 1e4:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    theta = np.linspace(0.0, math.pi / 2, SLICES + 1)
    heights = np.cos(theta) ** (freedom - 1)
    steps = (heights[1:] + heights[:-1]) / 2
    below = np.concatenate(([0.0], np.cumsum(steps))) / steps.sum()
    return math.sqrt(freedom) * math.tan(float(np.interp(confidence, below, theta)))


def welch(a: Sequence[float], b: Sequence[float], confidence: float, how: str) -> Ratio:
    """From repeats of both, at least two each, none of them 0 or less: the logarithms' means, Welch's interval."""
    logs = [np.log(np.asarray(values, dtype=np.float64)) for values in (a, b)]
    parts = [float(one.var(ddof=1)) / len(one) for one in logs]
    middle, error = float(logs[1].mean() - logs[0].mean()), math.sqrt(sum(parts))
    if error == 0.0:
        return Ratio(math.exp(middle), math.exp(middle), math.exp(middle), how)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(one) - 1) for part, one in zip(parts, logs, strict=True))
    half = student(confidence, max(freedom, 1.0)) * error
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), how)


def paired(a: Sequence[float], b: Sequence[float], confidence: float, how: str) -> Ratio:
    """From repeats of which the i-th of A and the i-th of B were given the same work: what differs between the repeats
    falls out.
    """
    logs = np.log(np.asarray(b, dtype=np.float64)) - np.log(np.asarray(a, dtype=np.float64))
    middle, error = float(logs.mean()), float(logs.std(ddof=1)) / math.sqrt(len(logs))
    half = student(confidence, len(logs) - 1) * error
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), how)


def bootstrap(
    a: Sequence[float], b: Sequence[float], statistic: Callable[[Floats], Floats], confidence: float, how: str
) -> Ratio:
    """From samples of one run each. statistic: of each row of a matrix. Percentile interval of RESAMPLES resamplings,
    the same at every call.
    """
    rng = np.random.default_rng(1)
    drawn = []
    for values in (a, b):
        given = np.asarray(values, dtype=np.float64)
        picked = [statistic(given[rng.integers(0, len(given), (50, len(given)))]) for _ in range(RESAMPLES // 50)]
        drawn.append(np.concatenate(picked))
    ratios = drawn[1] / np.maximum(drawn[0], 1e-12)
    whole = [float(statistic(np.asarray([values], dtype=np.float64))[0]) for values in (a, b)]
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Ratio(whole[1] / max(whole[0], 1e-12), float(low), float(high), how)


def shares(a: tuple[int, int], b: tuple[int, int], confidence: float) -> Ratio:
    """From (hits, total) of both: the ratio of two shares, each with half a hit added (Katz, with Walter's
    correction).
    """
    (hits_a, all_a), (hits_b, all_b) = a, b
    value = (hits_b / all_b) / max(hits_a / all_a, 1e-12)
    middle = math.log((hits_b + 0.5) / (all_b + 0.5)) - math.log((hits_a + 0.5) / (all_a + 0.5))
    spread = 1 / (hits_b + 0.5) - 1 / (all_b + 0.5) + 1 / (hits_a + 0.5) - 1 / (all_a + 0.5)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(max(spread, 0.0))
    return Ratio(value, math.exp(middle - half), math.exp(middle + half), f"{all_a} and {all_b} items")


def inner(series: Sequence[float]) -> list[float]:
    """The full seconds of a run: without the first and the last, in which it began and ended."""
    return [max(one, 0.5) for one in series[1:-1]]
