"""Reads a histogram from a Prometheus text page and takes quantiles of what came between two readings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Histogram:
    """bounds: upper bounds of the buckets in seconds, the last one is inf. counts: samples at or below each bound
    (cumulative). total: sum of the samples in seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    def since(self, before: Histogram) -> Histogram:
        """What came after an earlier reading. A server that restarted in between has fewer samples now: then all it
        has.
        """
        if before.bounds != self.bounds or before.counts[-1] > self.counts[-1]:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Histogram(self.bounds, counts, self.total - before.total)

    @property
    def samples(self) -> float:
        return self.counts[-1]

    def quantile(self, q: float) -> float:
        """The q-th quantile (0 to 1), linear within its bucket as Prometheus does it; the last finite bound beyond
        that; nan of nothing.
        """
        if not self.samples:
            return math.nan
        rank, below, low = q * self.samples, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank and count > below:
                return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
            below, low = count, low if math.isinf(bound) else bound
        return low


def read_histogram(page: str, name: str) -> Histogram | None:
    """The histogram of that name, summed over its labels, or None where the page has none. Raises ValueError on what is
    no such page.
    """
    buckets: dict[float, float] = {}
    total = 0.0
    for family in text_string_to_metric_families(page):
        if family.name != name:
            continue
        for sample in family.samples:
            if sample.name == f"{name}_sum":
                total += sample.value
            elif sample.name == f"{name}_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
    if not buckets:
        return None
    bounds = tuple(sorted(buckets))
    return Histogram(bounds, tuple(buckets[bound] for bound in bounds), total)
