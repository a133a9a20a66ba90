"""The scheduler of one rank: plans steps within a token budget and commits their results later.

There is one rule. A request has `num_computed_tokens`, and all its known tokens and drafts are to be computed. Running
requests are planned first, so that inter-token latency stays flat; then new ones are admitted. The host does not know
the results of the last `depth` steps, so lengths are UPPER BOUNDS here; the device has the true lengths and pads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import islice
from typing import Mapping, Sequence

import msgspec

from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import MissingPage
from thalweg.core.acceptance import AcceptanceCounts
from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import GrammarTracker
from thalweg.core.messages import (
    Abort,
    ControlReply,
    Drain,
    FlushCache,
    Rejected,
    RequestEvent,
    Stats,
    Submit,
    ToEngine,
    TokenDelta,
)
from thalweg.core.plan import GrammarState, Output, PageAppend, StepPlan
from thalweg.core.request import ReleaseReason, Request, RequestState
from thalweg.core.ticket import TicketState, Tier
from thalweg.scheduler.draft_length import DraftLengthPolicy, FixedDraftLength, VerifiedDrafts
from thalweg.scheduler.kv_cache import KVCacheManager, NoTier
from thalweg.scheduler.plan_builder import PlanBuilder, PromptShare, WholeBudget
from thalweg.scheduler.prompt_share import MAX_WAITING, waiting_prompts
from thalweg.scheduler.requests import Limits, WaitingQueue, make_request
from thalweg.scheduler.results import StepResultProcessor

RUNNING, ENDED = RequestState.RUNNING, (ReleaseReason.ABORT, ReleaseReason.FINISH)
MAX_BYPASS_COUNT = 64  # times that later requests that need fewer pages may bypass a request
MAX_TRIES = 16  # requests that do not fit, in one plan
PREFILL_RESERVED_DIVISOR = 4  # while prompts wait, this part of a step's tokens (1 / 4) is reserved for them
NO_TIER, NO_DRAFTS, NOTHING_DRAFTED, WHOLE_BUDGET = NoTier(), FixedDraftLength(0), AcceptanceCounts(), WholeBudget()


class Scheduler:
    """Owns every request from its `Submit` to the release of its last page."""

    def __init__(
        self,
        limits: Limits,
        allocator: PageAllocator,
        tier: Tier = NO_TIER,
        draft_length: DraftLengthPolicy = NO_DRAFTS,
        prompt_share: PromptShare = WHOLE_BUDGET,
        *,
        grammars: GrammarTracker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: in seconds, of arrivals."""
        self.limits, self.stages, self.draft_length, self.grammars = limits, limits.stages, draft_length, grammars
        self.prompt_share, self.clock = prompt_share, clock
        self.tree, self.allocator = limits.tree, allocator
        # longest sequence that both the model and the page pool can hold, in tokens
        self.context = min(limits.context, allocator.num_pages * allocator.page_size)
        self.draining = False
        self.step = 0  # the next one to launch
        self.prefill_wait = 0  # see `core.agreement.RankStep`
        self.last_committed_step = -1  # the last one committed
        self.seeds = random.Random(limits.seed)
        self.counters = Stats()
        self.steps_by_drafts: list[int] = []  # steps that sampled, by the drafts of each sequence
        self.kv_cache = KVCacheManager(limits.slots, allocator, tier)
        self.results = StepResultProcessor(self.kv_cache, grammars, self.counters)
        self.requests: dict[int, Request] = {}  # all, by uid
        self.live: dict[int, Request] = {}  # those with pages
        self.queue = WaitingQueue(limits.policy, self.kv_cache.num_hit_pages)
        self._constrained: set[int] = set()  # uids with a grammar
        self._compiling: dict[int, Request] = {}  # queued requests whose grammar is being compiled
        self._transferring: list[Request] = []  # live requests that wait on a ticket: LOADING, SENDING
        self._prefilling: list[Request] = []  # RUNNING requests; the next plan drops those that have left
        self._decoding: list[Request] = []  # the same, least recently sampled first
        self._sampled: list[Request] = []  # requests that sample in the last plan
        self._masked: list[Request] = []  # of these, those with a grammar
        self._events: list[RequestEvent] = []
        self._changed = False  # a message, a commit or a release since the last plan
        self._was_busy = False  # requests were left after the last commit, so the next step follows at once

    # ---- messages
    def handle(self, messages: Sequence[ToEngine]) -> list[Rejected | ControlReply]:
        """Handles messages of clients. Never raises for their contents: the answer is a `Rejected`."""
        replies: list[Rejected | ControlReply] = []
        for message in messages:
            self._changed = True
            match message:
                case Submit():
                    replies.extend(self._submit(message))
                case Abort():
                    for uid in message.uids:
                        self._abort(uid)
                case FlushCache():
                    self.allocator.flush()
                    replies.append(ControlReply(message.id))
                case Drain():
                    self.draining = True
        return replies + self._check_grammars() if self._constrained else replies

    def add(self, r: Request) -> None:
        """Queues a request with a new uid, whose prompt and end fit `context`."""
        if not r.preempted:
            r.arrived = self.clock()
        self.requests[r.uid] = r
        self.kv_cache.add(r)
        self.queue.add(r)
        self._changed = True

    def _submit(self, message: Submit) -> list[Rejected]:
        try:
            if message.uid in self.requests:
                raise InvalidRequest("uid", f"{message.uid} is in use by a request that has not ended; draw a new one")
            r = make_request(message, self.limits, self.context, self.seeds, self.requests.get(message.sibling))
        except InvalidRequest as error:
            return [Rejected(message.uid, error.field, error.message)]
        if r.has_grammar:
            r.ticket = self.grammars.open(r.uid, r.grammar)
            self._constrained.add(r.uid)
            self._compiling[r.uid] = r
        self.add(r)
        return []

    def _check_grammars(self) -> list[Rejected | ControlReply]:
        """Admits requests whose grammar has been compiled. Rejects those whose grammar failed to compile or broke."""
        rejected: list[Rejected | ControlReply] = []
        for r in [r for r in self._compiling.values() if r.ticket and r.ticket.is_done]:
            del self._compiling[r.uid]
            ticket, r.ticket, self._changed = r.ticket, None, True
            if ticket is not None and ticket.state is TicketState.FAILED:
                rejected.append(Rejected(r.uid, r.grammar.field, ticket.error))
                self.queue.remove(r)
                self._finish_request(r)
        for uid, why in self.grammars.pop_failed():
            broken = self.requests.get(uid)
            if broken is not None and broken.release_reason not in ENDED:
                # the only answer: a delta with "abort" might overtake it
                rejected.append(Rejected(uid, broken.grammar.field, why))
                self._abort_request(broken)
        return rejected

    def _abort(self, uid: int) -> None:
        r = self.requests.get(uid)
        if r is None or r.release_reason in ENDED:  # a SENDING request has finished and ends by itself
            return
        self.results.add_abort(r)
        self._abort_request(r)

    def _abort_request(self, r: Request) -> None:
        """Ends `r` in whatever state it is. The caller tells the client."""
        r.finish = "abort"
        self.counters.aborted += 1
        if r.state is not RequestState.QUEUED:
            self._mark_for_release(r, ReleaseReason.ABORT)
            return
        self.queue.remove(r)
        self._finish_request(r)

    # ---- planning
    def plan(self, num_drafts: int, may_prefill: bool = True) -> StepPlan:
        """The next step; it may have no rows. num_drafts: that the last launched step was asked to propose.
        may_prefill: False leaves prompts to a later step.
        """
        if self._sampled:
            for r in self._sampled:
                r.num_drafts = num_drafts
            if self.draft_length.max_drafts or self.counters.drafter_failures:
                self.steps_by_drafts += [0] * (num_drafts + 1 - len(self.steps_by_drafts))
                self.steps_by_drafts[num_drafts] += 1
        self._changed = False
        for r in [r for r in self._transferring if r.ticket and r.ticket.is_done]:
            self._finish_transfer(r)
            if r.state is RUNNING:
                self._prefilling.append(r)
        published_step = max(self.step - self.stages, self.last_committed_step)  # that of a drained pipeline is later
        builder = PlanBuilder(self.step, published_step, self.limits.budget)
        self._plan_decoding(builder)
        load = builder.decode_load
        if may_prefill:
            builder.tokens_left = self._prompt_tokens(builder)
            self._plan_prefilling(builder)
            self._plan_admissions(builder)
        has_prompts = bool(self._prefilling or self.queue)
        self._changed |= has_prompts and not may_prefill  # they may be allowed in the next step
        self.prefill_wait = has_prompts * (1 if may_prefill else min(self.prefill_wait + 1, 255))
        # After the whole plan: rows of one step do not read each other's KV, LATER steps may read it.
        for r in builder.prefilling:
            self.kv_cache.cache_full_pages(r, min(r.num_computed_tokens, len(r.prompt)))
        self._sampled, self._masked = builder.sampling, builder.masked
        if builder.rows:
            self.prompt_share.expect(self.step, load, builder.prompt_tokens, builder.prompt_pairs)
        return builder.build(self._choose_drafts(builder))

    def _choose_drafts(self, builder: PlanBuilder) -> int:
        """Drafts to propose: few enough that one step verifies those of all rows and leaves a share to prompts."""
        if not self.draft_length.max_drafts:
            return 0
        if builder.prefilling:
            self.draft_length.note_prefill()
        has_prompts = bool(self._prefilling or self._transferring or self.queue)
        tokens = self.limits.budget - self.limits.budget // PREFILL_RESERVED_DIVISOR * has_prompts
        return self.draft_length.choose(builder.sampling, max(tokens // max(len(self._decoding), 1) - 1, 0))

    def _plan_decoding(self, builder: PlanBuilder) -> None:
        """A row for each decoding request that may sample in this step. A cap balances them over pipeline stages."""
        cap = -(-len(self._decoding) // self.stages)
        page_size, max_drafts, rows = self.allocator.page_size, self.draft_length.max_drafts, builder.rows
        reserved = self.tree.reserved_columns(max_drafts) if max_drafts else 0
        waiting: list[Request] = []
        planned: list[Request] = []
        is_short = False
        for r in self._decoding:
            if r.state is not RUNNING or r.release_reason is not ReleaseReason.NONE:
                continue
            waiting.append(r)
            known, n = len(r.prompt) + len(r.output_ids), 1 + r.num_drafts
            if r.last_sampled > builder.published_step or known + r.samples_in_flight >= r.end:
                continue  # some pipeline stage does not know its last sample, or it is sampled up to its end
            if len(planned) >= cap or n > builder.tokens_left or rows and n != rows[0].n:
                continue  # rows with drafts form one rectangle, for attention kernels that read lengths on the device
            start = known + r.max_tokens_in_flight - 1
            # the drafter writes the KV of what this step proposes before the next plan
            missing = -(-min(start + n + reserved, r.end) // page_size) - len(r.pages)
            if missing > 0:
                if missing > self.allocator.num_available():
                    is_short = is_short or self._preempt_one()
                    continue
                pages = self.kv_cache.append_pages(r, missing)
                builder.appends.append(PageAppend(r.slot, len(r.pages) - missing, pages))
            waiting.pop()
            planned.append(r)
            builder.add_decode_row(r, start, self.tree.max_accepted(r.num_drafts) if r.num_drafts else 0)
        self._decoding = waiting + planned
        if is_short:  # the preempted request may be among those that wait
            self._decoding = [r for r in self._decoding if _is_running(r)]

    def _prompt_tokens(self, builder: PlanBuilder) -> int:
        """Most prompt tokens of this step."""
        slots = len(self.kv_cache.free_slots)
        is_waiting = bool(self._prefilling or self.queue and slots)
        if not is_waiting or not builder.tokens_left or not (builder.rows or self.stages > 1):
            return builder.tokens_left
        queued, page_size = list(islice(self.queue.unordered(), min(slots, MAX_WAITING))), self.allocator.page_size
        waiting = waiting_prompts(
            self._prefilling, queued, self.clock(), lambda r: self.kv_cache.num_hit_pages(r) * page_size
        )
        others = min(slots, len(self.queue)) - len(queued)
        return self.prompt_share.choose(builder.decode_load, waiting, others, builder.tokens_left)

    def _plan_prefilling(self, builder: PlanBuilder) -> None:
        prefilling, self._prefilling = self._prefilling, []
        for r in prefilling:
            if _is_running(r):
                self._plan_chunk(r, builder)

    def _plan_chunk(self, r: Request, builder: PlanBuilder) -> None:
        """As many tokens as the budget has left. Their pages were allocated at admission."""
        n = min(r.prefill_len - r.num_computed_tokens, builder.tokens_left)
        if n:
            builder.add_prefill_row(r, n)
            self.counters.prefill_tokens += n
        (self._prefilling if r.num_computed_tokens < r.prefill_len else self._decoding).append(r)

    # ---- admission
    def _plan_admissions(self, builder: PlanBuilder) -> None:
        """Admits in the order of the policy. Passes over requests that are blocked, and over large ones for which there
        are too few pages, until too many requests have bypassed them.
        """
        if not self.queue or not self.kv_cache.free_slots or not builder.tokens_left:
            return
        loading = (
            r for r in self._transferring if r.state is RequestState.LOADING and r.release_reason is ReleaseReason.NONE
        )
        filling = (*self._prefilling, *builder.prefilling, *loading)
        missing_pages = {self.kv_cache.next_missing_page(r) for r in filling}
        too_large: list[Request] = []
        for r in self.queue.ordered():
            if self._is_blocked(r, builder, missing_pages):
                continue
            if not self._admit(r):
                too_large.append(r)
                has_pages = self.allocator.num_available() > len(self.live) - len(self._transferring)
                if not has_pages or not _may_be_bypassed(r) or len(too_large) == MAX_TRIES:
                    return
                continue
            for waiting in too_large:
                waiting.bypass_count += 1
            if r.state is RUNNING:
                self._plan_chunk(r, builder)
            if not self.kv_cache.free_slots or not builder.tokens_left or not all(map(_may_be_bypassed, too_large)):
                return
            missing_pages.add(self.kv_cache.next_missing_page(r))

    def _is_blocked(self, r: Request, builder: PlanBuilder, missing_pages: set[MissingPage | None]) -> bool:
        """Whether the grammar of `r` is being compiled, or others will compute the page that `r` needs next."""
        if r.ticket is not None:
            return True
        first = r.sibling
        if first is not None:
            is_prefilling = first.state is RUNNING and first.num_computed_tokens < len(first.prompt)
            is_waiting = first.state in (RequestState.QUEUED, RequestState.LOADING)
            if is_waiting or is_prefilling or first in builder.prefilling:
                return True
            r.sibling = None  # its prompt is launched, or it is gone
        return self.kv_cache.is_computed_by_others(r, missing_pages)

    def _admit(self, r: Request) -> bool:
        """Admits `r` if there are pages for its tokens and one step more, and one for each running request to grow."""
        max_drafts = self.draft_length.max_drafts
        reserved = self.tree.reserved_columns(max_drafts) if max_drafts else 0
        num_tokens = min(r.num_tokens + 1 + reserved, r.end)
        ticket = self.kv_cache.allocate(r, num_tokens, reserve=len(self.live) - len(self._transferring))
        if ticket is None:
            return False
        self.queue.remove(r)
        self.live[r.uid] = r
        if not r.preempted:
            self._events.append(RequestEvent(r.uid, "admitted", time.time()))
        r.state, r.ticket, r.prefill_len = RequestState.LOADING, ticket, r.num_tokens
        r.num_drafts, r.drafts, r.parents, r.is_bound, r.last_sampled = 0, (), (), False, -1
        self._transferring.append(r)
        if ticket.state is not TicketState.PENDING:
            self._finish_transfer(r)
        return True

    def _finish_transfer(self, r: Request) -> None:
        """The ticket of `r` is done. If it failed, its tokens are computed."""
        ticket, r.ticket = r.ticket, None
        assert ticket is not None
        self._transferring.remove(r)
        if r.state is RequestState.SENDING:
            self._release_pages(r)
            self._finish_request(r)
            return
        if ticket.state is TicketState.OK and ticket.pages:
            r.num_computed_tokens += ticket.pages * self.allocator.page_size
            self.kv_cache.cache_full_pages(r, r.num_computed_tokens)
        r.state = RUNNING
        if not r.preempted:
            r.num_cached_tokens = r.num_computed_tokens
            self.counters.prompt_tokens += len(r.prompt)
            self.counters.cached_tokens += r.num_cached_tokens
        if r.release_reason is not ReleaseReason.NONE:
            self._release(r)

    # ---- releasing
    def _preempt_one(self) -> bool:
        """Preempts the last request in the queue's order, unless pages of others are about to be released."""
        if self._transferring or any(r.release_reason is not ReleaseReason.NONE for r in self.live.values()):
            return False
        last = self.queue.last(self.live.values())
        self.counters.preemptions += 1
        self._events.append(RequestEvent(last.uid, "preempted", time.time()))
        self._mark_for_release(last, ReleaseReason.PREEMPT)
        return True

    def _mark_for_release(self, r: Request, why: ReleaseReason) -> None:
        """Marks `r`. Slot and pages are released when its last step in flight, or its ticket, is done."""
        r.release_reason = why
        if not r.rows_in_flight and r.state is RUNNING:
            self._release(r)

    def _release(self, r: Request) -> None:
        """Caches what `r` has computed and releases its slot and pages. None of its rows is in flight any more."""
        final = r.num_tokens - 1  # the last token's KV is never computed
        self.kv_cache.cache_full_pages(
            r, min(r.num_computed_tokens, final) if r.num_computed_tokens < r.prefill_len else final
        )
        self.kv_cache.release_slot(r)
        self.counters.wasted_drafts += len(r.drafts)
        r.drafts = ()
        self._changed = True  # another request may fit now
        if r.release_reason is ReleaseReason.FINISH and r.send:
            r.state, r.ticket = RequestState.SENDING, self.kv_cache.store(r)
            self._transferring.append(r)
            return
        self._release_pages(r)
        if r.release_reason is ReleaseReason.PREEMPT:
            r.state, r.release_reason = RequestState.QUEUED, ReleaseReason.NONE
            r.preempted += 1
            self.add(r)
        else:
            self._finish_request(r)

    def _release_pages(self, r: Request) -> None:
        del self.live[r.uid]
        self.kv_cache.release_pages(r)

    def _finish_request(self, r: Request) -> None:
        r.state = RequestState.DONE
        if r.grammar.masks:
            self.grammars.close(r.uid)
            self._constrained.discard(r.uid)
            self._compiling.pop(r.uid, None)
        del self.requests[r.uid]
        self.kv_cache.remove(r)

    # ---- results
    def grammar_states(self) -> Mapping[int, GrammarState]:
        """By uid: what the masks of the last plan depend on. Requests that have ended need no mask."""
        return {
            r.uid: GrammarState(r.num_tokens, (r.output_ids or r.prompt)[-1], r.drafts, r.parents)
            for r in self._masked
            if r.release_reason not in ENDED
        }

    def mark_launched(self) -> None:
        """The last plan was launched. A plan without rows is too if another rank has some."""
        self.step += 1

    def commit(self, plan: StepPlan, outputs: Sequence[Output]) -> None:
        """Applies the outputs of a retired step, one for each row. Their drafts follow in `commit_drafts`."""
        self.last_committed_step = plan.step
        self.counters.slow_steps += self.prompt_share.observe(plan.step, self._was_busy)
        self._changed = True
        verified: list[VerifiedDrafts] = []
        latest_arrival = self.clock() - first_token if (first_token := self.prompt_share.targets.first_token) else 0.0
        for row, output in zip(plan.rows, outputs, strict=True):
            r = self.requests[row.uid]
            r.rows_in_flight -= 1
            if r.arrived < latest_arrival and output.tokens and not r.output_ids and r.release_reason not in ENDED:
                self.counters.late_first_tokens += 1
            if row.samples:
                r.samples_in_flight -= 1
                r.max_tokens_in_flight -= 1
                if row.num_drafts:
                    r.max_tokens_in_flight -= self.tree.max_accepted(row.num_drafts)
                    if output.tokens:
                        self.results.add_verification(r, output)
                        if not output.done:  # a policy does not learn from drafts beyond the end of the sequence
                            verified.append(VerifiedDrafts(r, row.num_drafts, output.accepted_mask))
            if r.release_reason not in ENDED:  # a preempted request keeps the tokens that were in flight
                self.results.process(r, output)
            if r.release_reason is not ReleaseReason.NONE and not r.rows_in_flight and r.slot >= 0:
                self._release(r)
        self._was_busy = bool(self._decoding or self._prefilling)
        if verified:
            self.draft_length.observe(verified)

    def commit_drafts(self, plan: StepPlan, outputs: Sequence[Output]) -> None:
        """Applies the drafts of the step that was committed last."""
        if not self.draft_length.max_drafts:
            return
        if outputs and outputs[0].drafter_failed:
            self.draft_length.disable()
            self.counters.drafter_failures += 1
        for row, output in zip(plan.rows, outputs, strict=True):
            r = self.live.get(row.uid)
            if r is None or r.release_reason in ENDED:
                self.counters.wasted_drafts += len(output.drafts)
            elif output.tokens:
                r.drafts, r.parents = output.drafts, output.parents

    def take_deltas(self) -> tuple[TokenDelta, ...]:
        """New tokens and endings since the last call, in order."""
        return self.results.take_deltas()

    def take_events(self) -> tuple[RequestEvent, ...]:
        """Admissions and preemptions since the last call, in order."""
        events, self._events = self._events, []
        return tuple(events)

    def stats(self, busy_seconds: float) -> Stats:
        """busy_seconds: time in which steps were in flight."""
        pages = self.allocator.num_pages
        drafts = self.results.drafts.counts if self.results.drafts.drafted else NOTHING_DRAFTED
        return msgspec.structs.replace(
            self.counters,
            running=len(self.live) - len(self._transferring),
            waiting=len(self.queue) + sum(r.state is RequestState.LOADING for r in self._transferring),
            page_size=self.allocator.page_size,
            pages=pages,
            pages_used=pages - self.allocator.num_available(),
            pages_cached=self.allocator.tree.num_evictable,
            steps=self.step,
            step_seconds=busy_seconds,
            verifications=drafts.verifications,
            drafted_tokens=drafts.drafted,
            accepted_tokens=drafts.accepted,
            drafted_at=drafts.drafted_at,
            accepted_at=drafts.accepted_at,
            steps_by_num_drafts=tuple(self.steps_by_drafts),
        )

    @property
    def is_idle(self) -> bool:
        """There is no request."""
        return not self.requests

    @property
    def has_work(self) -> bool:
        """The next plan may have rows, so do not wait for messages. False while everything waits on tickets."""
        tickets = (*self._transferring, *self._compiling.values())
        return bool(self.requests) and (self._changed or any(r.ticket and r.ticket.is_done for r in tickets))


def _may_be_bypassed(r: Request) -> bool:
    """A preempted request has made room for others already."""
    return not r.preempted and r.bypass_count < MAX_BYPASS_COUNT


def _is_running(r: Request) -> bool:
    return r.state is RUNNING and r.release_reason is ReleaseReason.NONE
