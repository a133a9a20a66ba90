"""The scheduler by hand: admission, queue order, plans, deltas. `test_simulated_device.py` is its proof."""

from __future__ import annotations

import math
from typing import Any, Callable

import pytest

from tests.null.sim.fleet import NoGrammars
from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import PrefixCursor, RadixTree
from thalweg.core.messages import Abort, ControlReply, Drain, FlushCache, Rejected, Submit, TokenDelta
from thalweg.core.plan import Output, PageAppend, Row, SamplingNeeds, StepPlan, TokenLogprob
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.core.ticket import Ticket, TicketState
from thalweg.scheduler.draft_length import FixedDraftLength
from thalweg.scheduler.requests import POLICIES, Limits
from thalweg.scheduler.scheduler import MAX_BYPASS_COUNT, Scheduler

EOS, VOCAB, PAGE = 0, 100, 4


def make_scheduler(pages: int = 100, width: int = 0, tier: Any = None, **changes: Any) -> Scheduler:
    limits = Limits(**{"slots": 8, "budget": 64, "context": 40, "vocab": VOCAB, "eos_ids": (EOS,), **changes})
    allocator = PageAllocator(pages, RadixTree(PAGE))
    return Scheduler(
        limits, allocator, *([tier] if tier else []), draft_length=FixedDraftLength(width), grammars=NoGrammars()
    )


def submit(uid: int, prompt: tuple[int, ...] | int = 5, **changes: Any) -> Submit:
    fields = {name: changes.pop(name) for name in ("priority", "salt", "sibling") if name in changes}
    if isinstance(prompt, int):
        prompt = tuple((uid * 7 + i) % 99 + 1 for i in range(prompt))
    return Submit(uid, prompt, SamplingParams(**changes), **fields)


def step(b: Scheduler, say: Callable[[Row], int] = lambda row: 7, ends: dict[int, int] | None = None) -> StepPlan:
    """One synchronous step; every sampled row says `say(row)`, which ends it at EOS or at the length that was
    bound.
    """
    plan = b.plan(0)
    if plan.rows:
        b.mark_launched()
        outputs = []
        for row in plan.rows:
            r = b.requests[row.uid]
            if row.samples:
                token = say(row)
                outputs.append(Output((token,), done=token in r.stop_ids or r.num_tokens + 1 >= r.end))
            else:
                outputs.append(Output())
        b.commit(plan, outputs)
    return plan


def uids(plan: StepPlan) -> list[int]:
    return [row.uid for row in plan.rows]


# ---- the door


@pytest.mark.parametrize(
    ("message", "field", "says"),
    [
        (submit(1, ()), "prompt", "empty"),
        (submit(1, (5, -1)), "prompt", "-1 is out of vocabulary, which has 100"),
        (submit(1, (5, 100)), "prompt", "100 is out of"),
        (submit(1, (2**40,)), "prompt", "out of vocabulary"),
        (submit(1, 40), "prompt", "has 40 tokens"),
        (submit(1, 41, max_tokens=0), "prompt", "has 41 tokens"),
        (submit(1, temperature=math.nan), "temperature", "between"),
        (submit(1, top_p=math.inf), "top_p", "between"),
        (submit(1, max_tokens=-1), "max_tokens", "at least 0"),
        (submit(1, stop_token_ids=(VOCAB,)), "stop_token_ids", "out of vocabulary"),
        (submit(1, logit_bias=((3, math.nan),)), "logit_bias", "between"),
    ],
)
def test_what_cannot_be_served_is_rejected_and_names_the_field(message: Submit, field: str, says: str):
    b = make_scheduler()
    (reply,) = b.handle([message])
    assert isinstance(reply, Rejected) and (reply.uid, reply.field) == (1, field) and says in reply.message
    assert b.is_idle and not b.has_work and not b.plan(0).rows


def test_a_uid_in_use_is_rejected_and_the_first_request_continues():
    b = make_scheduler()
    assert b.handle([submit(1)]) == []
    (reply,) = b.handle([submit(1)])
    assert isinstance(reply, Rejected) and reply.field == "uid"
    assert uids(step(b)) == [1]


def test_the_context_is_what_model_and_pool_can_hold():
    assert make_scheduler(pages=100).context == 40
    b = make_scheduler(pages=6)
    assert b.context == 20
    assert isinstance(b.handle([submit(1, 20)])[0], Rejected)
    assert b.handle([submit(2, 19), submit(3, 20, max_tokens=0)]) == []
    assert b.requests[2].end == 20


def test_a_bind_has_end_seed_and_stop_ids():
    b = make_scheduler()
    b.handle([submit(1, 5, max_tokens=3), submit(2, 5), submit(3, 5, max_tokens=99, seed=11, stop_token_ids=(4, EOS))])
    b.handle([submit(4, ignore_eos=True, stop_token_ids=(4,)), submit(5, ignore_eos=True)])
    plan = b.plan(0)
    assert [bind.end for bind in plan.binds] == [8, 40, 40, 40, 40]
    assert [bind.stop_ids for bind in plan.binds] == [(EOS,), (EOS,), (4, EOS), (4,), ()]
    seeds = [bind.seed for bind in plan.binds]
    assert seeds[2] == 11 and len(set(seeds)) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    again = make_scheduler()
    again.handle([submit(1), submit(2)])
    assert [bind.seed for bind in again.plan(0).binds] == seeds[:2], "drawn from the scheduler's own generator"


# ---- plans


def test_a_plan_binds_chunks_and_decodes():
    b = make_scheduler(budget=6)
    b.handle([submit(1, 8, seed=5)])
    first, second, third = step(b), step(b), step(b)
    assert first.rows == (Row(1, 0, 0, 6, 0, False),) and first.max_kv_len == 6 and first.tokens == 6
    assert first.appends == (PageAppend(0, 0, (1, 2, 3)),) and first.binds[0].prompt_len == 8
    assert second.rows == (Row(1, 0, 6, 2, 0, True),) and not second.binds and not second.appends
    assert third.rows == (Row(1, 0, 8, 1, 0, True),) and third.max_kv_len == 9
    assert [plan.step for plan in (first, second, third)] == [0, 1, 2]


def test_growth_is_appended_at_the_end_of_the_table():
    b = make_scheduler()
    b.handle([submit(1, 6)])
    plans = [step(b) for _ in range(4)]
    assert [plan.appends for plan in plans] == [(PageAppend(0, 0, (1, 2)),), (), (), (PageAppend(0, 2, (3,)),)]


def test_running_requests_are_served_before_chunks_and_new_ones():
    b = make_scheduler(budget=8)
    b.handle([submit(1, 3), submit(2, 3)])
    step(b)
    b.handle([submit(3, 20), submit(4, 2)])
    plan = step(b)
    assert [(row.uid, row.n, row.samples) for row in plan.rows] == [(1, 1, True), (2, 1, True), (3, 6, False)]
    plan = step(b)
    assert [(row.uid, row.n) for row in plan.rows] == [(1, 1), (2, 1), (3, 6)], "4 waits for a budget"


def test_a_small_token_budget_is_shared_in_turns():
    b = make_scheduler(budget=4, width=1)
    b.handle([submit(uid, 1) for uid in range(4)])
    served = []
    for _ in range(5):
        plan = b.plan(1)
        b.mark_launched()
        b.commit(plan, [Output((7,), (7,))] * len(plan.rows))
        served.append(uids(plan))
    assert served == [[0, 1, 2, 3], [0, 1], [2, 3], [0, 1], [2, 3]]


def test_rows_with_other_drafts_take_turns():
    b = make_scheduler(width=2)
    b.handle([submit(uid, 2) for uid in range(3)])
    plan = b.plan(0)
    b.mark_launched()
    b.commit(plan, [Output((7,), (8, 8))] * 3)
    b.requests[1].num_drafts = 9  # as if it had sampled in another step
    b._sampled = [b.requests[0], b.requests[2]]
    b.handle([submit(uid, 5) for uid in (7, 8, 9)])
    plan = b.plan(2)
    assert [(row.uid, row.n, row.num_drafts) for row in plan.rows] == [
        (0, 3, 2), (2, 3, 2), (7, 5, 0), (8, 5, 0), (9, 5, 0)
    ]  # fmt: skip
    b.mark_launched()
    b.commit(plan, [Output((7,), (8, 8))] * 5)
    first = b.plan(2).rows[0]
    assert (first.uid, first.n, first.num_drafts) == (1, 10, 9)


def test_sampling_needs_come_from_sampled_rows():
    b = make_scheduler(budget=12)
    b.handle([submit(1, 2, temperature=0.0), submit(2, 20, top_p=0.5, frequency_penalty=1.0)])
    assert step(b).needs == SamplingNeeds(), "the second one does not sample yet"
    assert step(b).needs == SamplingNeeds(random=True, truncated=True, penalised=True)
    b.handle(
        [
            submit(3, 2, temperature=0.0, top_p=0.5, logprobs=3, logit_bias=((1, 1.0),)),
            submit(4, 2, temperature=0.0, min_tokens=2),
        ]
    )
    assert step(b).needs == SamplingNeeds(True, True, True, True, 3)
    assert make_scheduler().plan(0).needs == SamplingNeeds()
    b = make_scheduler()
    b.handle([submit(1)])
    assert step(b).needs == SamplingNeeds(random=True), "top_p 1 truncates nothing"


def test_prompt_logprobs_are_contiguous_ranges_of_each_chunk():
    b = make_scheduler(budget=4)
    b.handle([submit(1, 10, prompt_logprobs=2, max_tokens=3)])
    rows = [step(b).rows[0] for _ in range(3)]
    assert [row[-3:] for row in rows] == [(0, 4, 2), (4, 8, 2), (8, 9, 2)]
    assert step(b).rows[0][-3:] == (0, 0, 0)


# ---- policies


def admitted(b: Scheduler, messages: list[Submit]) -> list[int]:
    """The order in which requests bind when one slot is free."""
    b.handle(messages)
    order: list[int] = []
    while not b.is_idle:
        plan = step(b, say=lambda row: EOS)
        order += [row.uid for row in plan.rows if any(bind.slot == row.slot for bind in plan.binds)]
    return order


def test_policies_only_order_the_queue():
    shared = tuple(range(1, 13))
    warm = [submit(0, shared)]
    late = [
        submit(1, 9),
        submit(2, (*shared[:4], 99), priority=5),
        submit(3, (*shared[:8], 98, 97), priority=1),
        submit(4, 3, priority=5),
    ]
    orders = {}
    for policy in POLICIES:
        b = make_scheduler(slots=1, policy=policy)
        assert admitted(b, warm) == [0]
        orders[policy] = admitted(b, late)
    assert orders == {"fcfs": [1, 2, 3, 4], "lpm": [3, 2, 1, 4], "priority": [2, 4, 3, 1]}


def test_siblings_wait_for_the_first_without_blocking_the_queue():
    b = make_scheduler(budget=8)
    prompt = tuple(range(1, 15))
    b.handle([submit(1, prompt), submit(2, prompt, sibling=1), submit(3, prompt, sibling=1), submit(4, 3)])
    assert uids(step(b)) == [1]
    assert uids(step(b)) == [1, 4], "the last chunk of 1 is launched now, and hit from the next step on"
    plan = step(b)
    assert uids(plan) == [1, 4, 2, 3] and [bind.computed for bind in plan.binds] == [12, 12]


def test_siblings_are_released_when_the_first_is_aborted():
    b = make_scheduler(budget=4)
    prompt = tuple(range(1, 15))
    b.handle([submit(1, prompt), submit(2, prompt, sibling=1)])
    step(b)
    b.handle([Abort((1,))])
    plan = step(b)
    assert uids(plan) == [2] and plan.binds[0].computed == 4, "what the first computed is cached"


def test_a_sibling_of_higher_priority_waits_for_the_first_too():
    b = make_scheduler(policy="priority", budget=4)
    prompt = tuple(range(1, 7))
    b.handle([submit(1, prompt), submit(2, prompt, sibling=1, priority=5), submit(3, 3, priority=1)])
    assert [uids(step(b)) for _ in range(3)] == [[3, 1], [3, 1], [3, 1]], "3 comes before 1, and 2 blocks neither"
    plan = step(b)
    assert uids(plan) == [3, 1, 2] and plan.binds[0].computed == 4


def test_a_request_waits_for_a_page_that_another_computes():
    b = make_scheduler(budget=10)
    prompt = tuple(range(1, 13))
    b.handle([submit(1, prompt), submit(2, (*prompt, 60)), submit(3, (*prompt[:8], 50, 51))])
    b.handle([submit(4, prompt, prompt_logprobs=0, max_tokens=0)])
    assert uids(step(b)) == [1]
    plan = step(b)
    assert uids(plan) == [1, 3, 4], "3 needs what 1 has launched before; 4 wants prompt logprobs, so it computes them"
    assert [bind.computed for bind in plan.binds] == [8, 0]
    plan = step(b)
    assert uids(plan)[-1] == 2 and [bind.computed for bind in plan.binds] == [12]
    b = make_scheduler()
    b.handle([submit(1, prompt), submit(2, prompt), submit(3, prompt, prompt_logprobs=0)])
    assert uids(step(b)) == [1, 3]


def score(b: Scheduler, uid: int, prompt: tuple[int, ...], top_k: int = 0) -> tuple[int, tuple[TokenLogprob, ...]]:
    """Where the request begins to compute, and its log-probabilities. That of a token is minus the token, and says
    which request computed it.
    """
    b.handle([submit(uid, prompt, prompt_logprobs=top_k, max_tokens=0)])
    computed = -1
    while not b.is_idle:
        plan = b.plan(0)
        b.mark_launched()
        computed = plan.binds[0].computed if plan.binds else computed
        outputs = []
        for row in plan.rows:
            tokens = prompt[row.prompt_logprobs_start + 1 : row.prompt_logprobs_stop + 1]
            entries = (TokenLogprob(-token, (uid,) * top_k, (0.0,) * top_k) for token in tokens)
            outputs.append(Output(prompt_logprobs=tuple(entries)))
        b.commit(plan, outputs)
    (delta,) = b.take_deltas()
    assert [entry.logprob for entry in delta.prompt_logprobs] == [-token for token in prompt[1:]]
    return computed, delta.prompt_logprobs


def test_prompt_logprobs_that_are_kept_need_not_be_computed():
    b = make_scheduler(pages=30, budget=7)
    prompt = tuple(range(1, 19))
    assert score(b, 1, prompt, 2)[0] == 0
    computed, found = score(b, 2, (*prompt[:11], 50, 51))
    assert computed == 4, "the token after a page depends on what the page's last token computes"
    assert all(entry.top_ids == () for entry in found)
    computed, found = score(b, 3, (*prompt, 52), 1)
    assert computed == 12 and {entry.top_ids for entry in found[:15]} == {(1,)}, "from the first request"
    assert score(b, 4, prompt, 3)[0] == 0, "fewer alternatives were kept"
    assert score(b, 5, prompt, 3)[0] == 12
    b.kv_cache.prompt_logprobs.drop()
    assert score(b, 6, prompt)[0] == 0, "other weights"
    b.allocator.flush()
    assert score(b, 7, prompt)[0] == 0


def test_log_probabilities_of_two_sets_of_weights_are_not_kept():
    b = make_scheduler(pages=30, budget=7)
    prompt = tuple(range(1, 19))
    b.handle([submit(1, prompt, prompt_logprobs=0, max_tokens=0)])
    for _ in range(3):
        plan = b.plan(0)
        b.mark_launched()
        row = plan.rows[0]
        b.commit(
            plan,
            [Output(prompt_logprobs=(TokenLogprob(-1.0),) * (row.prompt_logprobs_stop - row.prompt_logprobs_start))],
        )
        if row.start == 0:
            b.kv_cache.prompt_logprobs.drop()
    assert len(b.take_deltas()[0].prompt_logprobs) == 17
    assert score(b, 2, prompt)[0] == 0


# ---- pages


def test_admission_leaves_each_running_request_a_page_to_grow_on():
    b = make_scheduler(pages=7)
    b.handle([submit(1, 7, max_tokens=9), submit(2, 7), submit(3, 7)])
    assert uids(step(b)) == [1, 2], "2 pages each, 2 left for the growth of two"


def test_the_youngest_request_is_preempted_and_loses_no_tokens():
    b = make_scheduler(pages=7)
    b.handle([submit(1, 7), submit(2, 7)])
    while not b.counters.preemptions:
        step(b)
    out = list(b.requests[2].output_ids)
    assert b.requests[2].state.value == "queued" and out and b.allocator.num_available() > 0
    while 2 in b.requests:
        step(b)
    assert b.is_idle and b.allocator.num_available() == 6


def test_a_request_of_low_priority_is_preempted_before_an_urgent_one():
    b = make_scheduler(pages=7, policy="priority")
    b.handle([submit(1, 7), submit(2, 7, priority=5)])
    while not b.counters.preemptions:
        step(b)
    assert b.requests[1].state.value == "queued" and 2 in b.live
    while 2 in b.requests:
        step(b)
    assert 1 in b.requests, "it was admitted again, and lost no tokens"
    while not b.is_idle:
        step(b)


def test_small_requests_overtake_a_large_one_that_does_not_fit():
    b = make_scheduler(pages=14, slots=80, budget=100)
    b.handle([submit(1, 13, max_tokens=27)])
    step(b)
    b.handle([submit(2, 34, max_tokens=2), *(submit(uid, 2, max_tokens=1) for uid in range(3, 200))])
    large, counts = b.requests[2], [0]
    while 1 in b.requests:
        step(b)
        counts.append(large.bypass_count)
    assert counts[:3] == sorted(set(counts[:3])), "while it waits, others are admitted in each step"
    assert max(counts) == 64 == MAX_BYPASS_COUNT and counts[-1] == 64
    step(b)
    assert large.state.value == "running", "then it is the next"
    while not b.is_idle:
        step(b)


def test_admission_and_preemption_events_are_reported_once():
    b = make_scheduler(pages=7)
    b.handle([submit(1, 7), submit(2, 7)])
    marks = []
    while not b.is_idle:
        step(b)
        marks += [(event.uid, event.kind) for event in b.take_events()]
    assert marks == [(1, "admitted"), (2, "admitted"), (2, "preempted")], "who returns is not admitted again"
    assert b.take_events() == ()


def test_a_preempted_prompt_is_counted_once():
    b = make_scheduler(pages=7)
    b.handle([submit(1, 7), submit(2, 7)])
    while not b.is_idle:
        step(b)
    assert b.counters.preemptions and b.counters.prompt_tokens == 14


def test_a_skipped_preempted_and_readmitted_request_is_listed_once():
    b = make_scheduler(pages=5, budget=12)
    b.handle([submit(1, 3), submit(2, 3)])
    step(b)
    one, two = b.requests[1], b.requests[2]
    b._sampled, b._decoding = [], [two, one]
    one.num_drafts, two.num_drafts = (
        11,
        12,
    )  # the younger one wants more than the budget; the older one more pages than there are
    plan = b.plan(0)
    assert two.preempted == 1 and uids(plan) == [2] and len(plan.binds) == 1
    assert [r.uid for r in b._decoding] == [1, 2]


def test_generated_pages_are_cached_as_they_fill():
    b = make_scheduler()
    b.handle([submit(1, (1, 2, 3, 4, 5))])
    for _ in range(8):
        step(b)
    b.handle([submit(2, (1, 2, 3, 4, 5, *[7] * 7, 9))])  # 12 positions, 8 of them generated; the last has no KV yet
    assert [bind.computed for bind in step(b).binds] == [12]


def test_preempted_requests_queue_in_order_of_arrival():
    b = make_scheduler(pages=7, slots=2)
    b.handle([submit(1, 7), submit(2, 7), submit(3, 2)])
    while not b.counters.preemptions:
        step(b)
    assert [r.uid for r in b.queue.ordered()] == [2, 3]


def test_a_page_evicted_while_held_is_cached_again_at_the_end():
    b = make_scheduler(pages=12, slots=2)
    prompt = tuple(range(1, 13))
    b.handle([submit(1, prompt, max_tokens=1)])
    step(b)
    b.handle([submit(2, prompt, prompt_logprobs=0, max_tokens=2)])
    step(b)  # it computes the same pages again: those of 1 stay in the cache, its own do not enter
    b.allocator.release(b.allocator.allocate(b.allocator.num_available()))
    assert b.allocator.tree.num_cached == 0
    step(b)
    assert b.is_idle and b.allocator.tree.num_cached == 3


def test_a_hit_reaches_beyond_the_prompt_once_its_logprobs_are_known():
    b = make_scheduler()
    b.handle([submit(1, 6, prompt_logprobs=0, max_tokens=12)])
    r = b.requests[1]
    assert b.kv_cache.max_hit_pages(r) == 0
    r.prompt_logprobs.extend([TokenLogprob(-1.0)] * 4)
    assert b.kv_cache.max_hit_pages(r) == 1
    r.prompt_logprobs.append(TokenLogprob(-1.0))
    b.kv_cache.append_tokens(r, [7] * 7)
    assert b.kv_cache.max_hit_pages(r) == 3


# ---- news


def test_the_first_delta_carries_prompt_counts_and_the_last_the_finish_reason():
    b = make_scheduler(budget=3)
    b.handle([submit(1, 5, prompt_logprobs=0, max_tokens=2, logprobs=0)])
    scores = [TokenLogprob(-float(q)) for q in range(4)]
    says = [
        Output(prompt_logprobs=tuple(scores[:3])),
        Output((7,), logprobs=(TokenLogprob(-9.0),), prompt_logprobs=tuple(scores[3:])),
        Output((8,), done=True),
    ]
    news: list[TokenDelta] = []
    for output in says:
        plan = b.plan(0)
        b.mark_launched()
        b.commit(plan, [output])
        news += b.take_deltas()
    assert news == [
        TokenDelta(1, (7,), logprobs=(TokenLogprob(-9.0),), prompt_logprobs=tuple(scores)),
        TokenDelta(1, (8,), "length"),
    ]
    assert b.take_deltas() == ()


def test_a_stop_id_is_named_and_stays_in_the_tokens():
    b = make_scheduler()
    b.handle([submit(1, stop_token_ids=(9,)), submit(2), submit(3, ignore_eos=True, max_tokens=2)])
    step(b, say=lambda row: {1: 9, 2: EOS, 3: EOS}[row.uid])
    assert b.take_deltas() == (
        TokenDelta(1, (9,), "stop", 9),
        TokenDelta(2, (EOS,), "stop", EOS),
        TokenDelta(3, (EOS,)),
    )
    step(b, say=lambda row: EOS)
    assert b.take_deltas() == (TokenDelta(3, (EOS,), "length"),)


def test_a_request_for_no_tokens_ends_with_its_prompt():
    b = make_scheduler(budget=4)
    b.handle([submit(1, 6, max_tokens=0, prompt_logprobs=1), submit(2, 40, max_tokens=0)])
    plan = b.plan(0)
    b.mark_launched()
    later = b.plan(0)
    b.mark_launched()
    assert not any(row.samples for row in (*plan.rows, *later.rows))
    b.commit(plan, [Output(prompt_logprobs=(TokenLogprob(-1.0),) * 4)])
    assert b.take_deltas() == ()
    b.commit(later, [Output(prompt_logprobs=(TokenLogprob(-1.0),)), Output()])
    (delta,) = b.take_deltas()
    assert (delta.uid, delta.tokens, delta.finish, len(delta.prompt_logprobs)) == (1, (), "length", 5)
    while not b.is_idle:
        step(b)
    assert b.take_deltas() == (TokenDelta(2, (), "length"),) and b.counters.decode_tokens == 0


def test_a_cached_prompt_is_reported_once():
    b = make_scheduler()
    b.handle([submit(1, tuple(range(1, 10)), max_tokens=1)])
    step(b)
    b.handle([submit(2, tuple(range(1, 10)), max_tokens=2)])
    step(b)
    step(b)
    assert [(d.uid, d.cached) for d in b.take_deltas()] == [(1, 0), (2, 8), (2, 0)]
    stats = b.stats(1.5)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.prefill_tokens, stats.decode_tokens) == (18, 8, 10, 3)
    assert (stats.finished, stats.steps, stats.step_seconds, stats.pages, stats.pages_cached) == (2, 3, 1.5, 99, 2)


def test_an_abort_is_answered_at_once_wherever_the_request_is():
    b = make_scheduler(slots=1)
    b.handle([submit(1), submit(2)])
    plan = b.plan(0)
    b.mark_launched()
    b.handle([Abort((1, 2, 77))])
    assert b.take_deltas() == (TokenDelta(1, (), "abort"), TokenDelta(2, (), "abort"))
    assert list(b.requests) == [1] and b.allocator.num_available() < 99, "a step in flight still writes its pages"
    b.handle([Abort((1,))])
    b.commit(plan, [Output((7,))])
    assert b.is_idle and b.take_deltas() == () and b.allocator.num_available() == 99 and b.counters.aborted == 2


# ---- waiting


class OneTicket:
    """A tier whose transfers end when the test says so."""

    def __init__(self) -> None:
        self.ticket = Ticket(0, TicketState.PENDING)

    def load(self, tokens: Any, salt: int, first: int, pages: Any) -> Ticket:
        return self.ticket

    def store(self, tokens: Any, salt: int, pages: Any) -> Ticket:
        return self.ticket


def test_runnable_is_false_while_everything_waits_on_tickets():
    tier = OneTicket()
    b = make_scheduler(tier=tier, slots=1)
    b.handle([submit(1), submit(2)])
    assert b.has_work
    assert not b.plan(0).rows and not b.has_work and not b.is_idle
    tier.ticket.state = TicketState.FAILED
    assert b.has_work
    assert uids(step(b)) == [1] and b.has_work


def test_a_request_waits_for_pages_that_another_loads():
    tier = OneTicket()
    b = make_scheduler(tier=tier)
    prompt = tuple(range(1, 14))
    b.handle([submit(1, prompt), submit(2, prompt)])
    assert not b.plan(0).rows
    stats = b.stats(0.0)
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 2, 4)
    tier.ticket.pages, tier.ticket.state = 3, TicketState.OK
    tier.ticket = Ticket(0, TicketState.OK)  # of the next load
    plan = step(b)
    assert uids(plan) == [1, 2] and [bind.computed for bind in plan.binds] == [12, 12]
    assert b.stats(0.0).running == 2


def test_an_aborted_load_blocks_no_request():
    tier = OneTicket()
    b = make_scheduler(tier=tier)
    prompt = tuple(range(1, 14))
    b.handle([submit(1, prompt), submit(2, prompt)])
    b.plan(0)
    b.handle([Abort((1,))])
    tier.ticket = Ticket(0, TicketState.FAILED)  # of the next load
    plan = step(b)
    assert uids(plan) == [2] and 1 in b.requests, "1 holds its pages until its own ticket ends"


def test_control_messages():
    b = make_scheduler()
    b.handle([submit(1, 9, max_tokens=1)])
    step(b)
    assert b.stats(0.0).pages_cached == 2
    assert b.handle([FlushCache(4)]) == [ControlReply(4)]
    assert b.stats(0.0).pages_cached == 0 and b.allocator.num_available() == 99
    assert not b.draining and b.handle([Drain()]) == [] and b.draining and b.is_idle


# ---- thoughts


def finish(b: Scheduler, say: Callable[[Row], int] = lambda row: 7) -> None:
    while not b.is_idle:
        step(b, say)


def cached(b: Scheduler, tokens: tuple[int, ...]) -> int:
    """Pages of these tokens that are in the cache."""
    return b.allocator.tree.match(PrefixCursor(tokens, 0), len(tokens) // PAGE)


@pytest.mark.parametrize(
    ("keep", "pages"),
    [
        (RETAIN_ALL, 4),
        (CacheRetention(False), 2),
        (CacheRetention(False, tool_call_id=7), 4),
        (CacheRetention(False, tool_call_id=9), 2),
        (CacheRetention(False, think_start_id=7), 2),
        (CacheRetention(False, think_start_id=9), 4),
    ],
)
def test_pages_the_next_turn_cannot_use_are_not_cached(keep: CacheRetention, pages: int):
    """A prompt of two pages and a token; 9 tokens of output, of which 8 are computed."""
    b = make_scheduler()
    prompt = tuple(range(20, 29))
    b.handle([Submit(1, prompt, SamplingParams(max_tokens=9), retention=keep)])
    finish(b)
    assert cached(b, (*prompt, *[7] * 9)) == pages
    assert b.allocator.num_available() == b.allocator.num_pages


def test_aborted_reasoning_is_not_cached_even_with_a_tool_call():
    b = make_scheduler()
    prompt = tuple(range(20, 29))
    b.handle([Submit(1, prompt, SamplingParams(max_tokens=30), retention=CacheRetention(False, tool_call_id=7))])
    for _ in range(12):
        step(b)
    b.handle([Abort((1,))])
    finish(b)
    assert cached(b, (*prompt, *[7] * 12)) == 2


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_preempted_reasoning_stays_cached_until_its_request_ends(end: str):
    """The younger one gives its pages back while it thinks; when it returns it computes none of them again."""
    b = make_scheduler(pages=11, slots=2)
    old, young = tuple(range(20, 33)), tuple(range(50, 55))
    b.handle([Submit(1, old, SamplingParams(max_tokens=14, ignore_eos=True))])
    b.handle([Submit(2, young, SamplingParams(max_tokens=25, ignore_eos=True), retention=CacheRetention(False))])
    while not b.counters.preemptions:
        step(b)
    thought = b.requests[2].tokens
    had = (len(thought) - 1) // PAGE
    assert had > 2 and cached(b, thought) == had, "its own pages wait for it"
    if end == "abort":
        b.handle([Abort((2,))])
    computed = b.counters.prefill_tokens
    b.handle([Abort((1,))])
    if end == "finish":
        step(b)
        assert b.counters.prefill_tokens - computed == len(thought) - had * PAGE, "what it had is not computed again"
    finish(b)
    assert cached(b, thought) == len(young) // PAGE
    assert b.allocator.num_available() == b.allocator.num_pages


# ---- a model that computes no numbers


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_with_nan_output_ends_and_leaves_no_pages(chunked: bool) -> None:
    """At any row, while another one of its rows is in flight; what it found in the cache stays there."""
    b = make_scheduler(budget=10)
    b.handle([submit(1, (*range(1, 9), 50), max_tokens=2)])
    while b.requests:
        step(b)
    assert b.allocator.tree.num_cached == 2
    b.take_deltas()
    b.handle([submit(2, (*range(1, 9), *range(60, 60 + 17))), submit(3, 1, max_tokens=3)])
    plans = [b.plan(0)]
    b.mark_launched()
    if not chunked:
        b.commit(plans.pop(), [Output() for _ in b.live])
        plans.append(b.plan(0))
        b.mark_launched()
    plans.append(b.plan(0))
    b.mark_launched()
    wrong = [row.uid == 2 for row in plans[0].rows]
    b.commit(plans[0], [Output(done=one, is_nan=one) if one else Output((7,)) for one in wrong])
    assert [(delta.uid, delta.tokens, delta.finish) for delta in b.take_deltas() if delta.uid == 2] == [
        (2, (), "error")
    ]
    b.handle([Abort((2,))])
    b.commit(plans[1], [Output(done=row.uid == 2) if row.uid == 2 else Output((7,)) for row in plans[1].rows])
    assert 2 not in b.requests and b.allocator.tree.num_cached == 2
    while b.requests:
        step(b)
    stats = b.stats(0.0)
    assert (stats.broken, stats.aborted, stats.finished, stats.pages_used) == (1, 0, 2, 0)
    assert not [delta for delta in b.take_deltas() if delta.uid == 2], "it is reported once"
