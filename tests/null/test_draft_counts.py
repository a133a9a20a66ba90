"""Counts of accepted and rejected drafts, by request and for the engine."""

from __future__ import annotations

from tests.null.sim.fleet import NoGrammars
from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import NoPrefixCache
from thalweg.core.acceptance import AcceptanceCounter, AcceptanceCounts
from thalweg.core.messages import Submit
from thalweg.core.plan import Output
from thalweg.core.sampling import SamplingParams
from thalweg.scheduler.draft_length import FixedDraftLength
from thalweg.scheduler.requests import Limits
from thalweg.scheduler.scheduler import Scheduler


def test_counts_by_depth() -> None:
    count = AcceptanceCounter()
    assert (
        count.counts == AcceptanceCounts()
        and AcceptanceCounts().mean_length is None
        and AcceptanceCounts().rate is None
    )
    count.add(2, 2, 1)
    before = count.counts
    assert before == AcceptanceCounts(1, 2, 1, (1, 1), (1, 0))
    count.add(3, 3, 3)
    count.add(5, 2, 0)  # a tree: of five nodes two deep
    told = count.counts
    assert told == AcceptanceCounts(3, 10, 4, (3, 3, 1), (2, 1, 1))
    assert told.mean_length == 1 + 4 / 3 and told.rate == 0.4
    assert told.rates_at == (2 / 3, 1 / 3, 1.0) and told.histogram == (1, 1, 0, 1)
    assert told.since(before) == AcceptanceCounts(2, 8, 3, (2, 2, 1), (1, 1, 1))


def make_scheduler() -> Scheduler:
    limits = Limits(slots=4, budget=64, context=40, vocab=100, eos_ids=(0,))
    return Scheduler(
        limits, PageAllocator(100, NoPrefixCache(4)), draft_length=FixedDraftLength(2), grammars=NoGrammars()
    )


def step(b: Scheduler, *outputs: Output, width: int = 2) -> None:
    plan = b.plan(width)
    b.mark_launched()
    b.commit(plan, outputs)
    b.commit_drafts(plan, outputs)


def test_a_request_reports_its_draft_counts_when_it_ends() -> None:
    b = make_scheduler()
    b.handle([Submit(1, (5, 6), SamplingParams(max_tokens=20)), Submit(2, (7, 8), SamplingParams(stop=("x",)))])
    step(b, Output((1,), (2, 3)), Output((1,), (2,)))
    assert [delta.acceptance for delta in b.take_deltas()] == [None, None]
    step(b, Output((2, 3, 4), (5, 6)), Output((9,), (2, 3)))
    first, second = b.take_deltas()
    assert first.acceptance is None, "it goes on"
    assert second.acceptance == AcceptanceCounts(1, 1, 0, (1,), (0,)), "a stop string may end it with any token"
    step(b, Output((5, 0), (), True), Output((2,), ()), width=1)
    assert b.take_deltas()[0].acceptance == AcceptanceCounts(2, 4, 3, (2, 2), (2, 1))
    stats = b.stats(0.0)
    assert stats.acceptance == AcceptanceCounts(4, 7, 3, (4, 3), (2, 1))


def test_unverified_drafts_count_as_wasted() -> None:
    b = make_scheduler()
    b.handle([Submit(1, (5, 6), SamplingParams(max_tokens=20))])
    step(b, Output((1,), (2, 3)))
    b._abort(1)
    assert b.stats(0.0).wasted_drafts == 2 and b.take_deltas()[-1].acceptance is None


def test_steps_by_num_drafts_are_those_that_sampled() -> None:
    b = make_scheduler()
    b.handle([Submit(1, (5, 6), SamplingParams(max_tokens=20))])
    for width in (0, 2, 1, 2):
        step(b, Output((1,), (9,) * width), width=width)
    assert b.stats(0.0).steps_by_num_drafts == (0, 1, 2), "each width was agreed with the plan behind its step"
    b.draft_length.disable()
    step(b, Output((1,)), width=0)
    assert b.stats(0.0).steps_by_num_drafts == (0, 1, 2)
