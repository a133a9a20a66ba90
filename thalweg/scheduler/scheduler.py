"""The brain of one rank: each step it deals a budget of tokens to requests, and later commits what the device made of
it.

There is one rule. A request has `computed` tokens and wants all it knows and its drafts; running requests are served
first, so that the time between two tokens stays flat, then new ones are admitted. The host does not know the last
`depth` steps yet, so lengths are UPPER BOUNDS here; the device has the truth and turns what is over into padding.

`take` → `plan` → (`masks`) → `launched` → `commit` of an EARLIER step → `news`: the order in which `engine/loop.py`
calls.
"""

from __future__ import annotations

import random
from typing import Mapping, Sequence

from thalweg.cache.books import Books
from thalweg.cache.radix import Frontier
from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import GrammarTracker, NoGrammarTracker
from thalweg.core.messages import Abort, ControlReply, Drain, FlushCache, Rejected, Stats, Submit, ToEngine, TokenDelta
from thalweg.core.plan import GrammarState, Output, PageAppend, Row, StepPlan
from thalweg.core.request import Exit, Request, RequestState
from thalweg.core.ticket import NoTier, TicketState, Tier
from thalweg.scheduler import door
from thalweg.scheduler.earnings import Earnings
from thalweg.scheduler.holdings import Holdings
from thalweg.scheduler.limits import Limits
from thalweg.scheduler.queue import Queue
from thalweg.scheduler.sheet import Sheet
from thalweg.scheduler.tally import Tally
from thalweg.scheduler.verdicts import Verdicts
from thalweg.scheduler.widths import ConstantWidth, WidthPolicy

RUNNING, STAYS, GONE = RequestState.RUNNING, Exit.NONE, (Exit.ABORT, Exit.FINISH)
PROMPTS = 4  # drafts leave one part in so many of a step's tokens to prompts that wait
NO_TIER, NO_DRAFTS, NO_GRAMMARS = NoTier(), ConstantWidth(0), NoGrammarTracker()


class Scheduler:
    """Owns every request from `Submit` to its last page.

    context: the longest sequence, in tokens, that both the model and the page pool can hold.
    """

    def __init__(
        self,
        limits: Limits,
        books: Books,
        tier: Tier = NO_TIER,
        widths: WidthPolicy = NO_DRAFTS,
        grammars: GrammarTracker = NO_GRAMMARS,
    ) -> None:
        self.limits, self.stages, self.widths, self.grammars = limits, limits.stages, widths, grammars
        self.tree = limits.tree
        self.books, self.page = books, books.page_size
        self.context = min(limits.context, books.total * books.page_size)
        self.draining = False
        self.step = 0  # the next one to launch
        self.retired = -1  # the last one committed
        self.seeds = random.Random(limits.seed)
        self.tally = Tally()
        self.verdicts = Verdicts(self.tally)
        self.holdings = Holdings(limits.slots, books, tier)
        self.earnings = Earnings(self.holdings, grammars, self.tally)
        self.requests: dict[int, Request] = {}  # all, by uid
        self.live: dict[int, Request] = {}  # those that hold pages
        self.queue = Queue(limits.policy, self.holdings.hit)
        self._compiling: dict[int, Request] = {}  # queued ones whose grammar is being compiled
        self._waiting: list[Request] = []  # live ones that wait on a ticket: LOADING, SENDING
        # RUNNING ones; who has left is struck off at the next plan. Decoding ones stand least recently sampled first.
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []
        self._emitted: list[Request] = []  # in the last plan
        self._grammars: list[Request] = []  # rows of the last plan that need a mask
        self._marks: list[tuple[int, str]] = []  # (uid, what befell it)
        self._restless = False  # since the last plan there was a message, a commit, or somebody left

    # ---- messages
    # ------------------------------------------------------------------------------------------------------------

    def take(self, messages: Sequence[ToEngine]) -> list[Rejected | ControlReply]:
        """Does what the fronts ask. Never raises for what a front sent: the answer is a `Rejected`."""
        replies: list[Rejected | ControlReply] = []
        for message in messages:
            self._restless = True
            match message:
                case Submit():
                    replies.extend(self._submit(message))
                case Abort():
                    for uid in message.uids:
                        self._abort(uid)
                case FlushCache():
                    self.books.flush()
                    replies.append(ControlReply(message.id))
                case Drain():
                    self.draining = True
        return replies + self._refused()

    def add(self, r: Request) -> None:
        """`r` waits to be admitted. Its uid is new; its prompt and end fit `context`."""
        self.requests[r.uid] = r
        self.holdings.enter(r)
        self.queue.add(r)
        self._restless = True

    def _submit(self, message: Submit) -> list[Rejected]:
        if message.uid in self.requests:
            why = f"{message.uid} is in use by a request that has not ended; draw a new one"
            return [Rejected(message.uid, "uid", why)]
        try:
            r = door.enter(message, self.limits, self.context, self.seeds, self.requests.get(message.sibling))
        except InvalidRequest as wrong:
            return [Rejected(message.uid, wrong.field, wrong.message)]
        if r.has_grammar:
            r.ticket = self.grammars.open(r.uid, r.grammar)
            self._compiling[r.uid] = r
        self.add(r)
        return []

    def _refused(self) -> list[Rejected | ControlReply]:
        """Lets in the requests whose grammar has been compiled; refuses those where that failed, and ends those whose
        grammar broke.
        """
        refused: list[Rejected | ControlReply] = []
        for r in [r for r in self._compiling.values() if _landed(r)]:
            del self._compiling[r.uid]
            ticket, r.ticket, self._restless = r.ticket, None, True
            if ticket is not None and ticket.state is TicketState.FAILED:
                refused.append(Rejected(r.uid, r.grammar.field, ticket.error))
                self.queue.remove(r)
                self._end(r)
        for uid, why in self.grammars.pop_failed():
            broken = self.requests.get(uid)
            if broken is not None and broken.exit not in GONE:
                # its one ending: the news of an abort might overtake it
                refused.append(Rejected(uid, broken.grammar.field, why))
                self._stop(broken)
        return refused

    def _abort(self, uid: int) -> None:
        r = self.requests.get(uid)
        if r is None or r.exit in GONE:  # what is SENDING has finished, and ends by itself
            return
        self.earnings.aborted(r)
        self._stop(r)

    def _stop(self, r: Request) -> None:
        """Ends `r` wherever it is, whose front is told otherwise."""
        r.finish = "abort"
        self.tally.aborted += 1
        if r.state is RequestState.QUEUED:
            self.queue.remove(r)
            self._end(r)
        else:
            self._leave(r, Exit.ABORT)

    # ---- planning
    # ------------------------------------------------------------------------------------------------------------

    def plan(self, width: int) -> StepPlan:
        """The next step; it has no rows where there is nothing to do. width: the draft width that the last launched
        step was told to make: a row verifies what its slot's LAST sampling step made.
        """
        if self._emitted:
            self.verdicts.made(self._emitted, width)
            if self.widths.widest or self.tally.drafter_failures:
                self.tally.chose(width)
        self._restless = False
        self._poll()
        sheet = Sheet(self.limits.budget)
        self._plan_decoding(sheet)
        sheet.left = self.limits.prompt_tokens(len(sheet.rows), sheet.left)
        self._plan_prefilling(sheet)
        self._plan_admissions(sheet)
        # After the whole plan: rows of one step do not read each other, LATER steps may read these.
        for r in sheet.chunks:
            self.holdings.share(r, min(r.computed, len(r.prompt)))
        self._emitted, self._grammars = sheet.emitting, sheet.grammars
        if sheet.chunks:
            self.widths.beside()
        seen = max(self.step - self.stages, self.retired)  # a drained pipeline hears earlier
        return sheet.plan(self.step, seen, self.widths.draft(sheet.emitting, self._widest()))

    def _widest(self) -> int:
        """Drafts that decoding requests may have verified together in a step, and leave a share of it to prompts that
        wait.
        """
        prompts = bool(self._prefilling or self._waiting or self.queue)
        tokens = self.limits.budget - self.limits.budget // PROMPTS * prompts
        return max(tokens // max(len(self._decoding), 1) - 1, 0)

    def _plan_decoding(self, sheet: Sheet) -> None:
        """One row for each decoding request that may sample in this step. The cap balances them over the cohorts of a
        pipeline.
        """
        step, retired, stages, size = self.step, self.retired, self.stages, self.page
        unheard = step - stages  # who sampled after this is not heard of on every stage, until it has retired
        cap = -(-len(self._decoding) // stages)
        passed: list[Request] = []
        served: list[Request] = []
        tree = self.tree
        room = tree.reserved_columns(self.widths.widest)
        rows, appends, squeezed = sheet.rows, sheet.appends, False
        for r in self._decoding:
            if r.state is not RUNNING or r.exit is not STAYS:
                continue
            passed.append(r)
            known, end, drafts, n = len(r.prompt) + len(r.out), r.end, r.made, 1 + r.made
            if r.last > unheard and r.last > retired or known + r.emits >= end or len(served) >= cap or n > sheet.left:
                continue  # known + emits: all is sampled, await the truth
            if rows and n != rows[0].n:
                # rows with drafts are one rectangle, in which attention reads lengths on the device; it is their turn
                # next
                continue
            start = known + r.slack - 1
            upto = min(start + n, end)
            # what is drafted behind them has its entries in the drafter's planes before the next plan
            held = min(start + n + room, end)
            if held > len(r.pages) * size:
                short = self.holdings.short(r, held)
                if short > self.books.spare():
                    squeezed = squeezed or self._squeeze()
                    continue
                appends.append(PageAppend(r.slot, len(r.pages), self.holdings.grow(r, short)))
            passed.pop()
            served.append(r)
            rows.append(Row(r.uid, r.slot, start, n, drafts, True))
            sheet.left -= n
            sheet.reach = max(sheet.reach, upto)
            r.flight += 1
            sheet.emit(r, step, tree.max_accepted(drafts))
        self._decoding = passed + served
        if squeezed:  # whoever was squeezed may have been passed by before
            self._decoding = [r for r in self._decoding if r.state is RUNNING and r.exit is STAYS]

    def _plan_prefilling(self, sheet: Sheet) -> None:
        still: list[Request] = []
        for r in self._prefilling:
            if r.state is RUNNING and r.exit is STAYS:
                self._chunk(r, sheet)
                (still if r.computed < r.base else self._decoding).append(r)
        self._prefilling = still

    def _chunk(self, r: Request, sheet: Sheet) -> None:
        """As many of the tokens that `r` knew when it was admitted as the budget has left. Its pages are reserved since
        then.
        """
        n = min(r.base - r.computed, sheet.left)
        if n:
            sheet.chunk(r, n, self.step)
            self.tally.prefill_tokens += n

    # ---- admission
    # -----------------------------------------------------------------------------------------------------------

    def _plan_admissions(self, sheet: Sheet) -> None:
        """Admits in the order of the policy until one does not fit. Who is held is passed over and does not block those
        behind.
        """
        if not self.queue or not self.holdings.slots or not sheet.left:
            return
        loading = (r for r in self._waiting if r.state is RequestState.LOADING and r.exit is STAYS)
        filling = (*self._prefilling, *sheet.chunks, *loading)
        fronts = {self.holdings.frontier(r) for r in filling}
        for r in self.queue.order():
            if self._held(r, sheet, fronts):
                continue
            if not self._admit(r):
                return
            if r.state is RUNNING:
                self._chunk(r, sheet)
                (self._prefilling if r.computed < r.base else self._decoding).append(r)
            if not self.holdings.slots or not sheet.left:
                return
            fronts.add(self.holdings.frontier(r))

    def _held(self, r: Request, sheet: Sheet, fronts: set[Frontier | None]) -> bool:
        """True while another request is about to compute the very pages that `r` needs next (they are computed once and
        hit after), and while its grammar is being compiled.
        """
        if r.ticket is not None:
            return True
        first = r.sibling
        if first is not None:
            if first.state in (RequestState.QUEUED, RequestState.LOADING) or first in sheet.chunks:
                return True
            if first.state is RUNNING and first.computed < len(first.prompt):
                return True
            r.sibling = None  # it has launched its prompt, or is gone
        if self.holdings.hit(r) >= self.holdings.useful(r):
            return False
        front = self.holdings.frontier(r)
        return front is not None and front in fronts

    def _admit(self, r: Request) -> bool:
        """Seats `r` if there are pages for all it knows and a step's tokens, beside one for each running request to
        grow on.
        """
        upto = min(r.known + 1 + self.tree.reserved_columns(self.widths.widest), r.end)
        ticket = self.holdings.seat(r, upto, reserve=len(self.live) - len(self._waiting))
        if ticket is None:
            return False
        self.queue.remove(r)
        self.live[r.uid] = r
        if not r.preempted:
            self._marks.append((r.uid, "admitted"))
        r.state, r.ticket, r.base = RequestState.LOADING, ticket, r.known
        r.made, r.drafts, r.parents, r.bound, r.last = 0, (), (), False, -1
        self._waiting.append(r)
        if ticket.state is not TicketState.PENDING:
            self._land(r)
        return True

    def _poll(self) -> None:
        """A host tier, a store, a prefill peer: all are tickets."""
        for r in [r for r in self._waiting if _landed(r)]:
            self._land(r)
            if r.state is RUNNING:
                self._prefilling.append(r)

    def _land(self, r: Request) -> None:
        """The ticket of `r` has ended. Of a failed one nothing is computed, so it will be."""
        ticket, r.ticket = r.ticket, None
        assert ticket is not None, "only who waits on a ticket can land"
        self._waiting.remove(r)
        if r.state is RequestState.SENDING:
            self._vacate(r)
            self._end(r)
            return
        if ticket.state is TicketState.OK and ticket.pages:
            r.computed += ticket.pages * self.page
            self.holdings.share(r, r.computed)
        r.state = RUNNING
        if not r.preempted:
            r.cached = r.computed
            self.tally.prompt_tokens += len(r.prompt)
            self.tally.cached_tokens += r.cached
        if r.exit is not STAYS:
            self._release(r)

    # ---- leaving
    # -------------------------------------------------------------------------------------------------------------

    def _squeeze(self) -> bool:
        """A running request lacks pages. Those on their way home come first; then the youngest gives its own, one at a
        time.
        """
        if self._waiting or any(r.exit is not STAYS for r in self.live.values()):
            return False
        youngest = max(self.live.values(), key=_arrival)
        self.tally.preemptions += 1
        self._marks.append((youngest.uid, "preempted"))
        self._leave(youngest, Exit.PREEMPT)
        return True

    def _leave(self, r: Request, why: Exit) -> None:
        """Only a mark: the last step in flight, or the ticket, brings slot and pages home."""
        r.exit = why
        if not r.flight and r.state is RUNNING:
            self._release(r)

    def _release(self, r: Request) -> None:
        """Nothing of `r` is in flight any more: what it computed enters the prefix cache, slot and pages go home."""
        final = r.known - 1  # the last token's KV is never computed
        self.holdings.share(r, min(r.computed, final) if r.computed < r.base else final)
        self.holdings.stand_up(r)
        self.tally.wasted += len(r.drafts)
        r.drafts = ()
        self._restless = True  # what it gives back may let another one in
        if r.exit is Exit.FINISH and r.send:
            r.state, r.ticket = (
                RequestState.SENDING,
                self.holdings.send(r),
            )  # the pages stay leased until the copy is over
            self._waiting.append(r)
            return
        self._vacate(r)
        if r.exit is Exit.PREEMPT:
            r.state, r.exit = RequestState.QUEUED, STAYS
            r.preempted += 1
            self.add(r)
        else:
            self._end(r)

    def _vacate(self, r: Request) -> None:
        del self.live[r.uid]
        self.holdings.clear(r)

    def _end(self, r: Request) -> None:
        r.state = RequestState.DONE
        if r.has_grammar:
            self.grammars.close(r.uid)
            self._compiling.pop(r.uid, None)
        del self.requests[r.uid]
        self.holdings.leave(r)

    # ---- what became of it
    # ---------------------------------------------------------------------------------------------------

    def masks(self, plan: StepPlan) -> Mapping[int, GrammarState]:
        """What the grammars of this plan's rows go by. Who has ended since has no mask, and nobody reads its tokens."""
        return {
            r.uid: GrammarState(r.known, (r.out or r.prompt)[-1], r.drafts, r.parents)
            for r in self._grammars
            if r.exit not in GONE
        }

    def launched(self) -> None:
        """The plan was launched; with no rows too, where another rank had some."""
        self.step += 1

    def commit(self, plan: StepPlan, outputs: Sequence[Output]) -> None:
        """`plan` has retired, and `outputs` (one a row) are the truth about it."""
        self.retired = plan.step
        self._restless = True
        requests = self.requests
        if outputs and outputs[0].drafter_failed and self.widths.widest:
            self.widths.lost()
            self.tally.drafter_failures += 1
        for row, output in zip(plan.rows, outputs, strict=True):
            r = requests[row.uid]
            r.flight -= 1
            if row.emit:
                r.emits -= 1
                r.slack -= 1 + self.tree.max_accepted(row.num_drafts)  # the bound comes down to the truth
                if row.num_drafts and output.tokens:
                    self.verdicts.hear(r, row, output)
            leave = r.exit
            if leave is STAYS or leave is Exit.PREEMPT:  # who was preempted still earns what was in flight
                self.earnings.earn(r, output)
            else:
                self.tally.wasted += len(output.drafts)  # whoever has left verifies none
            if r.exit is not STAYS and not r.flight and r.slot >= 0:
                self._release(r)
        if heard := self.verdicts.told():
            self.widths.learn(heard)

    def news(self) -> tuple[TokenDelta, ...]:
        """What happened since the last call, in order."""
        return self.earnings.news()

    def marks(self) -> tuple[tuple[int, str], ...]:
        """Who was admitted and who preempted since the last call, as (uid, "admitted" or "preempted"), in order."""
        marks, self._marks = self._marks, []
        return tuple(marks)

    def stats(self, busy_seconds: float) -> Stats:
        """busy_seconds: time in which steps were in flight."""
        loading = sum(r.state is RequestState.LOADING for r in self._waiting)
        return self.tally.stats(
            running=len(self.live) - len(self._waiting),
            waiting=len(self.queue) + loading,
            pages=self.books.total,
            pages_used=self.books.total - self.books.spare(),
            pages_cached=self.books.tree.idle,
            steps=self.step,
            step_seconds=busy_seconds,
        )

    @property
    def idle(self) -> bool:
        """There is no request."""
        return not self.requests

    @property
    def runnable(self) -> bool:
        """The next plan may have work: do not wait for messages first. False while everything waits on tickets."""
        tickets = (*self._waiting, *self._compiling.values())
        return bool(self.requests) and (self._restless or any(map(_landed, tickets)))


def _landed(r: Request) -> bool:
    return r.ticket is not None and r.ticket.state is not TicketState.PENDING


def _arrival(r: Request) -> int:
    return r.uid
