"""`make soak`: long random runs of cache, scheduler and processes. Their results are committed under benchmarks/soak."""

from __future__ import annotations

import os

import pytest

from tests.soak import cache, kills, ranks, scheduler, triples

pytestmark = pytest.mark.soak


def test_a_million_cache_operations():
    count = cache.main(1_000_000, seed=0)
    assert all(count[kind] for kind in ("hits", "evicted", "refused", "flushed", "pinned"))


def test_twenty_thousand_simulated_mixes():
    total = scheduler.main(20_000, seed=0)
    assert total.preempted and total.cached and total.aborted


def test_twenty_lost_processes():
    """KILLS=200 for more."""
    count = kills.main(int(os.environ.get("KILLS", "20")), seed=0, seconds=1e6)
    assert count["killed"] and count["stopped"]


@pytest.mark.timeout(7200)
def test_all_triples_of_features_over_ranks():
    assert triples.main(seed=0)["cases"] > 150


def test_ten_thousand_steps_of_four_ranks():
    count = ranks.main(12_500, seed=0)
    assert count["steps"] >= 10_000 and count["sequences"]
