"""`make soak`: the long random drivers, at the sizes whose results are committed under benchmarks/soak."""

from __future__ import annotations

import pytest

from tests.soak import brain, cache

pytestmark = pytest.mark.soak


def test_a_million_operations_on_the_books():
    count = cache.main(1_000_000, seed=0)
    assert all(count[what] for what in ("hits", "evicted", "refused", "flushed", "pinned"))


def test_twenty_thousand_mixes():
    total = brain.main(20_000, seed=0)
    assert total.preempted and total.cached and total.aborted
