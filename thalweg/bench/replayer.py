"""Runs recorded steps again: the same plans, one after the other, on a worker built from the recorded settings.

Nothing is scheduled anew: the plans are the recorded ones, so each step computes the same rows in the same slots and
pages. The state of the device before the first recorded step is restored first: requests that ran already are bound
again, and pages that a plan takes from the prefix cache are filled from their tokens. A recording that begins with the
engine needs none of that, and on the same machine its replay is bit for bit the run. Otherwise the restored KV may
differ in its last bits, because it was computed in other chunks then.

A token that differs is reported, and the slot continues with the recorded one, so the steps after it stay those of the
recorded run.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from thalweg.bench.statistics import common_length
from thalweg.config.engine import EngineConfig
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.plan import PAGE, Bind, GrammarState, Output, PageAppend, Row, StepPlan, TokenLogprob
from thalweg.core.ticket import TicketState
from thalweg.engine.build import build
from thalweg.engine.local import LocalChannel
from thalweg.engine.recording import RecordedStep, Recording

NO_MASKS: Mapping[int, GrammarState] = {}


@dataclass(frozen=True, slots=True)
class Difference:
    """An output that differs from the recorded one."""

    step: int
    slot: int
    uid: int
    at: int  # output token of its request, from 0
    recorded: tuple[int, ...]  # tokens of the row
    now: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The error of a step."""

    step: int
    error: str
    trace: str


@dataclass(slots=True)
class ReplayReport:
    """Result of a replay: the steps that ran, and differences from the recording."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    compared: int = 0  # tokens that the recording has too
    different: int = 0  # rows
    differences: list[Difference] = field(default_factory=list)  # the first ones
    logprobs: int = 0  # compared
    logprob_gap: float = 0.0  # their largest difference
    filled: int = 0  # tokens whose KV was restored first
    raised: StepFailure | None = None


@dataclass(slots=True)
class _SlotState:
    """A slot's state on the device."""

    uid: int
    bind: Bind
    tokens: list[int]
    at: int  # tokens that have KV
    over: bool = False
    pages: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)  # keys[i] identifies all tokens up to the end of page i
    drafts: tuple[int, ...] = ()  # behind the tokens
    parents: tuple[int, ...] = ()  # of each of them, as in `Output`

    def key(self, page: int) -> int:
        while len(self.keys) <= page:
            i = len(self.keys)
            before = self.keys[-1] if self.keys else 0
            self.keys.append(hash((before, *self.tokens[i * PAGE : (i + 1) * PAGE])))
        return self.keys[page]


class Replayer:
    """Runs a recording on an engine built from `settings`. compare: whether the model is the recorded one, so that
    outputs can be compared; on another one token ids are folded into its vocabulary, and grammars are left out. Raises
    CheckpointError.
    """

    KEPT = 20  # differences

    def __init__(self, recording: Recording, settings: EngineConfig, compare: bool) -> None:
        self.recording, self.compare = recording, compare
        self.loop, _, facts, _ = build(settings, LocalChannel())
        self.worker, self.book = self.loop.worker, self.loop.scheduler.grammars
        self.vocab, self.budget = facts.vocab, settings.chunked_prefill_size
        self.parts = recording.config.dcp_size  # pages of `PAGE` tokens in a recorded one
        self.report = ReplayReport()
        self._grammars: dict[int, Grammar] = {request.uid: request.grammar for _, request in recording.requests}
        self._states: dict[int, _SlotState] = {}  # by slot
        self._filled: dict[int, int] = {}  # page -> the key of what it holds
        self._corrected: dict[int, Bind] = {}  # by slot: put right with the next step
        self._open: set[int] = set()
        self._launched = 0

    def run(self) -> Iterator[ReplayReport]:
        """Runs all steps; yields the report so far after each."""
        for seat in self.recording.slots:
            self._restore(seat.uid, self._adapt(seat.bind), split_pages(seat.pages, self.parts))
        for step in self.recording.steps:
            try:
                self._replay_step(step)
            except Exception as error:  # whatever a step raises is what is looked for
                if isinstance(error, UnsupportedConfig):
                    raise
                trace = "".join(traceback.format_exception(error))
                self.report.raised = StepFailure(step.plan.step, f"{type(error).__name__}: {error}", trace)
            self.report.steps += 1
            yield self.report
            if self.report.raised is not None:
                return

    # ---- what the first step finds

    def _restore(self, uid: int, bind: Bind, pages: Sequence[int]) -> None:
        state = _SlotState(uid, bind, list(bind.tokens), bind.computed, bind.end == 0, list(pages))
        self._states[bind.slot] = state
        if not state.over:
            self._fill(state, bind.computed)
            self._open_grammar(state)
        self._corrected[bind.slot] = bind

    def _fill(self, state: _SlotState, upto: int) -> None:
        """Computes the first `upto` tokens of a slot whose pages do not have them."""

        def holds(page: int) -> bool:
            return (page + 1) * PAGE <= upto and self._filled.get(state.pages[page]) == state.key(page)

        page, most = 0, max(1, self.budget // PAGE)
        while page * PAGE < upto:
            first = page
            while page * PAGE < upto and page - first < most and not holds(page):
                page += 1
            if page > first:
                self._compute(state, first * PAGE, min(page * PAGE, upto))
            else:
                page += 1

    def _compute(self, state: _SlotState, start: int, end: int) -> None:
        """A step that is not in the recording: this part of a slot alone."""
        slot = state.bind.slot
        known = tuple(state.tokens)
        bind = state.bind._replace(tokens=known, computed=start, end=len(known) + 1, has_grammar=False)
        row = Row(state.uid, slot, start, end - start, 0, False)
        self._launch(StepPlan(0, 0, (row,), (bind,), (PageAppend(slot, 0, tuple(state.pages)),), max_kv_len=end))
        self.report.filled += end - start
        self._note(state, start, end)

    def _note(self, state: _SlotState, start: int, end: int) -> None:
        """Notes the contents of the full pages from start to end."""
        for page in range(start // PAGE, end // PAGE):
            self._filled[state.pages[page]] = state.key(page)

    # ---- a step

    def _replay_step(self, step: RecordedStep) -> None:
        appends = (
            PageAppend(slot, first * self.parts, split_pages(pages, self.parts))
            for slot, first, pages in step.plan.appends
        )
        binds = tuple(self._adapt(bind) for bind in step.plan.binds)
        plan = replace(step.plan, binds=binds, appends=tuple(appends))
        tables = {append.slot: append.pages for append in plan.appends if append.first_entry == 0}
        uids = {row.slot: row.uid for row in plan.rows}
        for bind in plan.binds:
            state = _SlotState(uids[bind.slot], bind, list(bind.tokens), bind.computed, False, list(tables[bind.slot]))
            self._states[bind.slot] = state
            self._corrected.pop(bind.slot, None)
            self._fill(state, bind.computed)
            self._open_grammar(state)
        for append in plan.appends:
            self._state(append.slot).pages[append.first_entry :] = append.pages
        masks = {row.uid: mask for row in plan.rows if (mask := self._mask(row)) is not None}
        outputs = self._launch(self._correct(plan), masks)
        for i, (row, now) in enumerate(zip(plan.rows, outputs, strict=True)):
            self._finish_row(step.plan.step, row, now, None if step.outputs is None else step.outputs[i])

    def _correct(self, plan: StepPlan) -> StepPlan:
        """The plan with binds for the slots whose state differs; a bind sets all of a slot but its page table."""
        binds = tuple(self._corrected.values())
        tables = tuple(PageAppend(bind.slot, 0, tuple(self._state(bind.slot).pages)) for bind in binds)
        self._corrected.clear()
        return replace(plan, binds=binds + plan.binds, appends=tables + plan.appends)

    def _launch(self, plan: StepPlan, masks: Mapping[int, GrammarState] = NO_MASKS) -> Sequence[Output]:
        """Forward, sampling and their output."""
        number, self._launched = self._launched, self._launched + 1
        again = replace(plan, step=number, published_step=number - 1, waits_for_commit=False)
        self.worker.forward(again, None)
        self.worker.sample(again, masks, again.num_drafts)
        return self.worker.add_drafts(again, self.worker.output(again))

    def _state(self, slot: int) -> _SlotState:
        if slot not in self._states:
            raise UnsupportedConfig(
                f"slot {slot} is used before anything was put into it: the recording lacks a seat or a step"
            )
        return self._states[slot]

    def _finish_row(self, step: int, row: Row, now: Output, recorded: Output | None) -> None:
        """Compares the output of a row; its slot continues with the recorded one."""
        state, report = self._state(row.slot), self.report
        report.rows += 1
        report.tokens += len(now.tokens)
        truth = now
        if recorded is not None:
            truth = recorded._replace(tokens=tuple(self._fold(recorded.tokens)))
            if self.compare:
                self._compare(step, row, now, recorded)
        if state.over:
            return  # padding
        known = len(state.tokens)
        start = known - row.n + row.num_drafts if row.samples else row.start
        state.over = truth.done
        state.tokens += truth.tokens
        state.drafts, state.parents = now.drafts, now.parents
        # of drafts, the KV is right as far as they were accepted and are in the recording
        same = common_length(now.tokens[:-1], truth.tokens)
        state.at = known + same if row.samples else start + row.n
        self._note(state, start, state.at)
        if truth.tokens and state.at < len(state.tokens) - 1:
            self._compute(state, state.at, len(state.tokens) - 1)
            state.at = len(state.tokens) - 1
        if truth.tokens and state.uid in self._open:
            self.book.advance(state.uid, truth.tokens)
        if truth.tokens and (truth.tokens != now.tokens or truth.done != now.done):
            bind = state.bind
            end = 0 if truth.done else bind.end
            self._corrected[row.slot] = bind._replace(tokens=tuple(state.tokens), computed=state.at, end=end)

    def _compare(self, step: int, row: Row, now: Output, recorded: Output) -> None:
        report, state = self.report, self._state(row.slot)
        report.compared += len(recorded.tokens)
        both = min(len(now.tokens), len(recorded.tokens))  # they may differ in how many drafts were right
        ends = len(now.tokens) == len(recorded.tokens) and now.done != recorded.done
        if now.tokens[:both] != recorded.tokens[:both] or ends:
            report.different += 1
            if len(report.differences) < self.KEPT:
                at = len(state.tokens) - state.bind.prompt_len
                report.differences.append(Difference(step, row.slot, row.uid, at, recorded.tokens, now.tokens))
            return
        for old, new in ((recorded.logprobs, now.logprobs), (recorded.prompt_logprobs, now.prompt_logprobs)):
            if len(old) == len(new):
                report.logprobs += len(old)
                report.logprob_gap = max(report.logprob_gap, _gap(old, new))

    # ---- grammars

    def _open_grammar(self, state: _SlotState) -> None:
        """Compiles the grammar of a request that has just been bound."""
        uid, grammar = state.uid, self._grammars.get(state.uid, NO_GRAMMAR)
        if not self.compare or not state.bind.has_grammar or uid in self._open:
            return
        ticket = self.book.open(uid, grammar)
        while ticket.state is TicketState.PENDING:
            time.sleep(0.001)
        if ticket.state is TicketState.FAILED:
            raise UnsupportedConfig(f"request {uid}: its grammar does not compile any more: {ticket.error}")
        self._open.add(uid)
        out = state.tokens[state.bind.prompt_len :]
        if out:
            self.book.advance(uid, out)

    def _mask(self, row: Row) -> GrammarState | None:
        state = self._state(row.slot)
        if not row.samples or state.over or state.uid not in self._open:
            return None
        return GrammarState(len(state.tokens), state.tokens[-1], state.drafts, state.parents)

    # ---- another model

    def _adapt(self, bind: Bind) -> Bind:
        """The bind; for another model with its tokens folded into the vocabulary, and without a grammar."""
        if self.compare:
            return bind
        stops = tuple(token for token in bind.stop_ids if token < self.vocab)
        params = bind.params
        bias = tuple(pair for pair in params.logit_bias if pair[0] < self.vocab)
        return bind._replace(
            tokens=tuple(self._fold(bind.tokens)),
            stop_ids=stops,
            params=msgspec.structs.replace(params, logit_bias=bias),
            has_grammar=False,
        )

    def _fold(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens if self.compare else tuple(token % self.vocab for token in tokens)


def split_pages(pages: Sequence[int], parts: int) -> tuple[int, ...]:
    """Pages of one rank in place of these, each of which so many ranks have shared. Page 0 stays the null page."""
    return tuple((page - 1) * parts + 1 + part for page in pages for part in range(parts))


def _gap(old: Sequence[TokenLogprob], new: Sequence[TokenLogprob]) -> float:
    return max((abs(a.logprob - b.logprob) for a, b in zip(old, new, strict=True)), default=0.0)
