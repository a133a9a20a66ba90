"""Runs recorded steps again: the very plans, one after the other, on a worker built from the recorded settings.

Equality of the steps is by construction: the plans are the recorded ones, so each step computes the same rows in the
same slots and pages as it did then, and nothing is scheduled anew. What the first recorded step found in the device is
put there first: requests that ran already are seated again, and the pages that a plan takes from the prefix cache are
filled from their tokens. Where the recording is whole, i.e. begins with the engine, nothing has to be put there, and on
the same machine the replay is bit for bit the run; otherwise the KV that is made anew may differ in its last bits, as
it was cut into other chunks then.

A token that comes out differently is noted, and the slot goes on with the recorded one: what follows is that run's, not
another one.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import msgspec

from thalweg.config.engine import EngineConfig
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.plan import PAGE, Bind, GrammarState, Output, PageAppend, Row, StepPlan, TokenLogprob
from thalweg.core.ticket import TicketState
from thalweg.engine.build import build
from thalweg.engine.calibration_checks import check_backends
from thalweg.engine.local import LocalChannel
from thalweg.engine.recording import RecordedStep, Recording

NO_MASKS: Mapping[int, GrammarState] = {}


@dataclass(frozen=True, slots=True)
class Difference:
    """An output that is not the recorded one. at: which output token of its request, from 0; recorded and now: what
    came of the row.
    """

    step: int
    slot: int
    uid: int
    at: int
    recorded: tuple[int, ...]
    now: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Raised:
    """What a step died of."""

    step: int
    error: str
    trace: str


@dataclass(slots=True)
class Verdict:
    """steps, rows, tokens: run again; compared: tokens that the recording has too. differences: the first ones;
    different: how many in all. logprobs: log-probabilities compared, logprob_gap: their largest difference. filled:
    tokens whose KV was put there first.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    compared: int = 0
    different: int = 0
    differences: list[Difference] = field(default_factory=list)
    logprobs: int = 0
    logprob_gap: float = 0.0
    filled: int = 0
    raised: Raised | None = None


@dataclass(slots=True)
class _Place:
    """A slot, as the device knows it. keys[i]: stands for all tokens up to the end of page i. at: tokens that have KV.
    drafts: behind the tokens, parents: of each of them, as of `Output`.
    """

    uid: int
    bind: Bind
    tokens: list[int]
    at: int
    over: bool = False
    pages: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def key(self, page: int) -> int:
        while len(self.keys) <= page:
            i = len(self.keys)
            before = self.keys[-1] if self.keys else 0
            self.keys.append(hash((before, *self.tokens[i * PAGE : (i + 1) * PAGE])))
        return self.keys[page]


class _Died(Exception):
    """A step raised something."""

    def __init__(self, error: str, trace: str) -> None:
        super().__init__(error)
        self.error, self.trace = error, trace


class Replayer:
    """Runs a recording on an engine built from `settings`. compare: whether the model is the recorded one, so that
    outputs can be compared; on another one token ids are folded into its vocabulary, and grammars are left out. Raises
    CheckpointError.
    """

    KEPT = 20  # differences

    def __init__(self, recording: Recording, settings: EngineConfig, compare: bool) -> None:
        self.recording, self.compare = recording, compare
        self.loop, _, facts, _ = build(check_backends(settings), LocalChannel())
        self.worker, self.book = self.loop.worker, self.loop.scheduler.grammars
        self.vocab, self.budget = facts.vocab, settings.chunked_prefill_size
        self.verdict = Verdict()
        self._grammars: dict[int, Grammar] = {line.request.uid: line.request.grammar for line in recording.asked}
        self._places: dict[int, _Place] = {}  # by slot
        self._filled: dict[int, int] = {}  # page -> the key of what it holds
        self._corrected: dict[int, Bind] = {}  # by slot: put right with the next step
        self._open: set[int] = set()
        self._launched = 0

    def run(self) -> Iterator[Verdict]:
        """Runs all steps; the verdict so far after each."""
        for seat in self.recording.seats:
            self._sit(seat.uid, self._fitting(seat.bind), seat.pages)
        for step in self.recording.steps:
            try:
                self._again(step)
            except _Died as death:
                self.verdict.raised = Raised(step.plan.step, death.error, death.trace)
            self.verdict.steps += 1
            yield self.verdict
            if self.verdict.raised is not None:
                return

    # ---- what the first step finds

    def _sit(self, uid: int, bind: Bind, pages: Sequence[int]) -> None:
        place = _Place(uid, bind, list(bind.tokens), bind.computed, bind.end == 0, list(pages))
        self._places[bind.slot] = place
        if not place.over:
            self._fill(place, bind.computed)
            self._follow(place)
        self._corrected[bind.slot] = bind

    def _fill(self, place: _Place, upto: int) -> None:
        """Computes the first `upto` tokens of a place where its pages do not hold them."""
        page = 0
        while page * PAGE < upto:
            if self._holds(place, page, upto):
                page += 1
                continue
            first, most = page, max(1, self.budget // PAGE)
            while page * PAGE < upto and page - first < most and not self._holds(place, page, upto):
                page += 1
            self._compute(place, first * PAGE, min(page * PAGE, upto))

    def _holds(self, place: _Place, page: int, upto: int) -> bool:
        return (page + 1) * PAGE <= upto and self._filled.get(place.pages[page]) == place.key(page)

    def _compute(self, place: _Place, start: int, end: int) -> None:
        """A step that is not in the recording: this part of a place alone."""
        slot = place.bind.slot
        known = tuple(place.tokens)
        bind = place.bind._replace(tokens=known, computed=start, end=len(known) + 1, has_grammar=False)
        row = Row(place.uid, slot, start, end - start, 0, False)
        self._launch(StepPlan(0, 0, (row,), (bind,), (PageAppend(slot, 0, tuple(place.pages)),), max_kv_len=end))
        self.verdict.filled += end - start
        self._note(place, start, end)

    def _note(self, place: _Place, start: int, end: int) -> None:
        """Positions from start to end of a place have been computed: what its full pages hold."""
        for page in range(start // PAGE, end // PAGE):
            self._filled[place.pages[page]] = place.key(page)

    # ---- a step

    def _again(self, step: RecordedStep) -> None:
        plan = replace(step.plan, binds=tuple(self._fitting(bind) for bind in step.plan.binds))
        tables = {append.slot: append.pages for append in plan.appends if append.at == 0}
        uids = {row.slot: row.uid for row in plan.rows}
        for bind in plan.binds:
            place = _Place(uids[bind.slot], bind, list(bind.tokens), bind.computed, False, list(tables[bind.slot]))
            self._places[bind.slot] = place
            self._corrected.pop(bind.slot, None)
            self._fill(place, bind.computed)
            self._follow(place)
        for append in plan.appends:
            self._place(append.slot).pages[append.at :] = append.pages
        masks = {row.uid: state for row in plan.rows if (state := self._mask(row)) is not None}
        outputs = self._launch(self._correct(plan), masks)
        for i, (row, now) in enumerate(zip(plan.rows, outputs, strict=True)):
            self._took(step.plan.step, row, now, None if step.outputs is None else step.outputs[i])

    def _correct(self, plan: StepPlan) -> StepPlan:
        """The plan, and binds for the slots that stand otherwise than they did: a bind says all of a slot but its page
        table.
        """
        binds = tuple(self._corrected.values())
        tables = tuple(PageAppend(bind.slot, 0, tuple(self._place(bind.slot).pages)) for bind in binds)
        self._corrected.clear()
        return replace(plan, binds=binds + plan.binds, appends=tables + plan.appends)

    def _launch(self, plan: StepPlan, masks: Mapping[int, GrammarState] = NO_MASKS) -> Sequence[Output]:
        """A, B and their output. Raises _Died."""
        number, self._launched = self._launched, self._launched + 1
        again = replace(plan, step=number, seen=number - 1, waits_for_commit=False)
        try:
            self.worker.forward(again, None)
            self.worker.sample(again, masks, again.num_drafts)
            return self.worker.output(again)
        except Exception as error:  # whatever a step raises is what is looked for
            trace = "".join(traceback.format_exception(error))
            raise _Died(f"{type(error).__name__}: {error}", trace) from error

    def _place(self, slot: int) -> _Place:
        if slot not in self._places:
            raise UnsupportedConfig(
                f"slot {slot} is used before anything was put into it: the recording lacks a seat or a step"
            )
        return self._places[slot]

    def _took(self, step: int, row: Row, now: Output, recorded: Output | None) -> None:
        """Compares the output of a row; what was recorded is what its slot goes on with."""
        place, verdict = self._place(row.slot), self.verdict
        verdict.rows += 1
        verdict.tokens += len(now.tokens)
        truth = now
        if recorded is not None:
            truth = recorded._replace(tokens=tuple(self._fold(recorded.tokens)))
            if self.compare:
                self._compare(step, row, now, recorded)
        if place.over:
            return  # padding
        known = len(place.tokens)
        start = known - row.n + row.num_drafts if row.emit else row.start
        place.over = truth.done
        place.tokens += truth.tokens
        place.drafts, place.parents = now.drafts, now.parents
        # of drafts, the KV is right as far as they were accepted and are in the recording
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(now.tokens[:-1], truth.tokens, strict=False))
        )
        place.at = known + same if row.emit else start + row.n
        self._note(place, start, place.at)
        if truth.tokens and place.at < len(place.tokens) - 1:
            self._compute(place, place.at, len(place.tokens) - 1)
            place.at = len(place.tokens) - 1
        if truth.tokens and place.uid in self._open:
            self.book.advance(place.uid, truth.tokens)
        if truth.tokens and (truth.tokens != now.tokens or truth.done != now.done):
            bind = place.bind
            end = 0 if truth.done else bind.end
            self._corrected[row.slot] = bind._replace(tokens=tuple(place.tokens), computed=place.at, end=end)

    def _compare(self, step: int, row: Row, now: Output, recorded: Output) -> None:
        verdict, place = self.verdict, self._place(row.slot)
        verdict.compared += len(recorded.tokens)
        both = min(len(now.tokens), len(recorded.tokens))  # they may differ in how many drafts were right
        ends = len(now.tokens) == len(recorded.tokens) and now.done != recorded.done
        if now.tokens[:both] != recorded.tokens[:both] or ends:
            verdict.different += 1
            if len(verdict.differences) < self.KEPT:
                at = len(place.tokens) - place.bind.prompt_len
                verdict.differences.append(Difference(step, row.slot, row.uid, at, recorded.tokens, now.tokens))
            return
        for old, new in ((recorded.logprobs, now.logprobs), (recorded.scores, now.scores)):
            if len(old) == len(new):
                verdict.logprobs += len(old)
                verdict.logprob_gap = max(verdict.logprob_gap, _gap(old, new))

    # ---- grammars

    def _follow(self, place: _Place) -> None:
        """Opens the grammar of a request that has just been bound, and waits until it is compiled."""
        uid, grammar = place.uid, self._grammars.get(place.uid, NO_GRAMMAR)
        if not self.compare or not place.bind.has_grammar or uid in self._open:
            return
        ticket = self.book.open(uid, grammar)
        while ticket.state is TicketState.PENDING:
            time.sleep(0.001)
        if ticket.state is TicketState.FAILED:
            raise UnsupportedConfig(f"request {uid}: its grammar does not compile any more: {ticket.error}")
        self._open.add(uid)
        out = place.tokens[place.bind.prompt_len :]
        if out:
            self.book.advance(uid, out)

    def _mask(self, row: Row) -> GrammarState | None:
        place = self._place(row.slot)
        if not row.emit or place.over or place.uid not in self._open:
            return None
        return GrammarState(len(place.tokens), place.tokens[-1], place.drafts, place.parents)

    # ---- another model

    def _fitting(self, bind: Bind) -> Bind:
        """The bind as it is, or with what lies outside another model's vocabulary folded into it or left out."""
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


def _gap(old: Sequence[TokenLogprob], new: Sequence[TokenLogprob]) -> float:
    return max((abs(a.logprob - b.logprob) for a, b in zip(old, new, strict=True)), default=0.0)
