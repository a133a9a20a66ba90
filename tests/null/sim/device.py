"""The simulated device of one rank: p stages, each a stream in order, with latencies; the truth in slots; outputs come late."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Mapping, NamedTuple, Sequence

from tests.null.sim.clock import Clock
from tests.null.sim.model import VOCAB, chain, logprob, sample
from thalweg.cache.books import Books
from thalweg.core.plan import NULL_PAGE, Bind, MaskState, Output, Row, Shape, StepPlan, TokenLogprob
from thalweg.scheduler.door import needs


@dataclass
class Slot:
    """What a stage knows of a running request. at: positions that have KV."""

    bind: Bind
    tokens: tuple[int, ...]
    at: int
    drafts: tuple[int, ...] = ()
    done: bool = False
    pages: list[int] = field(default_factory=list)


class Work(NamedTuple):
    """What A made of one row: the hashes of its whole prefix, and its scores."""

    hashes: list[int]
    scores: tuple[TokenLogprob, ...]


class News(NamedTuple):
    slot: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    done: bool


class Device:
    def __init__(self, clock: Clock, rng: random.Random, stages: int, depth: int, books: Books) -> None:
        self.clock, self.rng, self.stages, self.books = clock, rng, stages, books
        self.page = books.page_size
        self.ring = self.ring_size(depth)
        self.plans: list[StepPlan | None] = [None] * self.ring
        self.masks: list[tuple[int, Mapping[int, MaskState]]] = [(-1, {})] * self.ring
        self.outputs: list[tuple[int, list[Output]]] = [(-1, [])] * self.ring
        self.pinned: list[tuple[int, list[Output]]] = [(-1, [])] * self.ring
        self.slots: list[dict[int, Slot]] = [{} for _ in range(stages)]
        self.kv = [[0] * (books.total + 1) * self.page for _ in range(stages)]
        self.streams: list[deque[tuple[str, StepPlan, int]]] = [deque() for _ in range(stages)]
        self.running = [False] * stages
        self.heard = [-1] * stages  # the last publish that each stage has heard of
        self.finished_a = [-1] * stages
        self.finished_b = self.copied = -1
        self.busy = 0
        self.published: dict[int, list[News]] = {}
        self.work: dict[int, list[Work | None]] = {}
        self.fails, self.lost = -1, False  # the step in which the drafter fails; whether it has
        self.computed = self.accepted = 0  # positions computed on the last stage, tokens that came of it

    def ring_size(self, depth: int) -> int:
        return depth + 1

    # ---- what the worker calls

    def forward(self, plan: StepPlan) -> None:
        """A: one entry a stage; returns at once."""
        self.plans[plan.step % self.ring] = plan
        for stream in self.streams:
            stream.append(("A", plan, 0))
            self._pump()

    def sample(self, plan: StepPlan, masks: Mapping[int, MaskState], width: int) -> None:
        """B: on the last stage, behind its A."""
        self.masks[plan.step % self.ring] = (plan.step, masks)
        self.streams[-1].append(("B", plan, width))
        self._pump()

    def read(self, step: int) -> list[Output]:
        assert self.copied >= step, "an output was read before the device made it"
        made, outputs = self.pinned[step % self.ring]
        assert made == step, "a pinned output was overwritten"
        return outputs

    # ---- streams

    def _pump(self) -> None:
        for stage, stream in enumerate(self.streams):
            if not stream or self.running[stage]:
                continue
            kind, plan, _ = stream[0]
            if kind == "A":  # a stage waits for the one before it; stage 0 for the news
                if stage == 0 and self.finished_b < plan.seen:
                    continue
                if stage > 0 and self.finished_a[stage - 1] < plan.step:
                    continue
            self.running[stage] = True
            time = self.rng.randint(8, 12) if kind == "A" else 1
            self.busy += time
            self.clock.after(time, lambda stage=stage: self._finish(stage))

    def _finish(self, stage: int) -> None:
        kind, plan, width = self.streams[stage].popleft()
        self.running[stage] = False
        if kind == "A":
            self._forward(stage, plan.step)
            self.finished_a[stage] = plan.step
        else:
            self._sample(plan.step, width)
            self.finished_b = plan.step
            self.clock.after(self.rng.randint(1, 4), lambda: self._copy(plan.step))
        self._pump()

    def _copy(self, step: int) -> None:
        """The side stream behind B's event."""
        i = step % self.ring
        assert self.outputs[i][0] == step, "the output ring was reused before the copy"
        self.pinned[i], self.copied = self.outputs[i], step

    def _plan(self, step: int) -> StepPlan:
        plan = self.plans[step % self.ring]
        assert plan is not None and plan.step == step, "the plan ring was reused before its step ran"
        return plan

    # ---- A

    def _forward(self, stage: int, step: int) -> None:
        plan, slots = self._plan(step), self.slots[stage]
        if stage < self.stages - 1:  # the last stage made the news itself
            for heard in range(self.heard[stage] + 1, plan.seen + 1):
                for news in self.published[heard]:
                    x = slots[news.slot]
                    x.tokens, x.drafts, x.done = news.tokens, news.drafts, news.done
                    x.at = len(x.tokens) - 1
        self.heard[stage] = max(self.heard[stage], plan.seen)
        for bind in plan.binds:
            slots[bind.slot] = Slot(bind, bind.tokens, bind.computed)
        for append in plan.appends:
            x = slots[append.slot]
            assert append.at == len(x.pages), "an append leaves a hole in the page table, or overwrites"
            x.pages.extend(append.pages)
        write: list[tuple[int, int]] = []
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows of one slot in a step"
        work = [self._prepare(self.kv[stage], slots[row.slot], row, plan, write) for row in plan.rows]
        for at, h in write:  # rows of one step do not read each other
            self.kv[stage][at] = h
        if stage == self.stages - 1:
            self.computed += len(write)
        assert self.work.setdefault(step, work) == work, "two stages disagree on what a row is"

    def _prepare(self, kv: list[int], x: Slot, row: Row, plan: StepPlan, write: list[tuple[int, int]]) -> Work | None:
        """Upper bounds become truth; what is over turns into padding."""
        if self.is_padding(x):
            return None  # a zombie: it touches the null page only
        assert len(x.drafts) <= row.drafts or not row.emit, "more drafts than the plan has room for"
        start, n = x.at, row.n - row.drafts + len(x.drafts) * row.emit
        assert not row.emit or start + n - len(x.drafts) == len(x.tokens), "a row starts at the wrong position"
        assert start <= row.start and (row.emit or start == row.start), "the plan's start is no upper bound"
        n = self.cut(n, x, start)
        known = (x.tokens + x.drafts)[: start + n]
        hashes = chain(x.bind.salt, known)
        assert len(known) == start + n and n > 0, "an unknown token was computed"
        assert start + n <= plan.reach, "a row reaches further than the plan says"
        assert all(p != NULL_PAGE and self.books.lease[p] for p in x.pages), (
            "a row in flight uses a page that nobody leases"
        )
        at = [p * self.page + i for p in x.pages for i in range(self.page)]
        assert len(at) >= len(hashes), "beyond the page table"
        assert [kv[i] for i in at[:start]] == hashes[:start], "another prefix's KV"
        write.extend(list(zip(at, hashes, strict=False))[start:])
        if not row.emit:
            x.at += n
        scored = range(row.score_from, row.score_to)
        assert all(start <= q < start + n for q in scored), "a score of a position that the row does not compute"
        return Work(
            hashes,
            tuple(
                logprob(hashes[q], known[q + 1] if q + 1 < len(known) else x.tokens[q + 1], row.score_top)
                for q in scored
            ),
        )

    def is_padding(self, x: Slot) -> bool:
        return x.done

    def cut(self, n: int, x: Slot, start: int) -> int:
        return min(n, x.bind.end - start)

    # ---- B: mask -> accept -> propose -> publish

    def _sample(self, step: int, width: int) -> None:
        plan, (of, masks) = self._plan(step), self.masks[step % self.ring]
        assert of == step, "the mask ring was reused before its step ran"
        outputs: list[Output] = []
        news: list[News] = []
        for row, work in zip(plan.rows, self.work.pop(step), strict=True):
            x = self.slots[-1][row.slot]
            if work is None or not row.emit:
                outputs.append(Output(scores=work.scores if work else (), done=work is None))
                continue
            self._check_needs(plan, x)
            outputs.append(self._accept(x, work, masks.get(row.uid), width))
            news.append(News(row.slot, x.tokens, x.drafts, x.done))
        self.lost = self.lost or step == self.fails
        if self.lost:
            outputs = [output._replace(lost=True) for output in outputs]
        self.published[step], self.outputs[step % self.ring] = news, (step, outputs)

    def _check_needs(self, plan: StepPlan, x: Slot) -> None:
        for has, wanted in zip(plan.needs, needs(x.bind.params), strict=True):
            assert has >= wanted, "B of this step does not compute what a row needs"

    def _accept(self, x: Slot, work: Work, mask: MaskState | None, width: int) -> Output:
        bind, hashes = x.bind, work.hashes
        assert not (bind.masked and mask) or (mask.known == len(x.tokens) and mask.drafts == x.drafts), (
            "a mask of another state"
        )
        got: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        verified = max(0, len(hashes) - len(x.tokens))
        for i in range(verified + 1):
            at = len(x.tokens) - 1 + i
            last = ((mask.last, *mask.drafts)[i] if mask else 1) if bind.masked else None
            got += (sample(hashes[at], bind.seed, last, self._banned(bind, at + 1)),)
            if bind.params.logprobs is not None:
                logprobs += (logprob(hashes[at], got[-1], bind.params.logprobs),)
            x.done = got[-1] in bind.stop_ids or at + 2 >= bind.end
            if x.done or i == verified or x.drafts[i] != got[-1]:
                break
        self.accepted += len(got)
        x.tokens += got
        x.at = len(x.tokens) - 1
        x.drafts = self._propose(x, width)
        return Output(got, x.drafts, x.done, logprobs, work.scores)

    def _propose(self, x: Slot, width: int) -> tuple[int, ...]:
        """A drafter is right most of the time, and may make fewer than asked. It makes its own entries of the last token and of its drafts."""
        bind, drafts = x.bind, ()
        if self.lost:
            return ()
        entries = 0 if x.done or not width else min(len(x.tokens) + width - 1, bind.end)
        assert len(x.pages) * self.page >= entries, "a draft without a page for its entry"
        for _ in range(self.rng.randint(0, width)):
            tokens = x.tokens + drafts
            right = sample(
                chain(bind.salt, tokens)[-1],
                bind.seed,
                tokens[-1] if bind.masked else None,
                self._banned(bind, len(tokens)),
            )
            drafts += (right if self.rng.random() < 0.7 else self.rng.randrange(1, VOCAB),)
        return drafts

    @staticmethod
    def _banned(bind: Bind, position: int) -> Sequence[int]:
        return bind.stop_ids if position - bind.prompt_len < bind.params.min_tokens else ()


class SimWorker:
    """The `Worker` of `engine/loop.py` over a simulated device."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def forward(self, plan: StepPlan, shape: Shape) -> None:
        assert shape.rows >= len(plan.rows) and shape.tokens >= plan.tokens and shape.reach >= plan.reach
        sizes = [row.n for row in plan.rows]
        uniform = next((i for i, n in enumerate(sizes) if n != sizes[0]), len(sizes))
        assert uniform >= sum(row.n == sizes[0] and row.drafts > 0 for row in plan.rows), "uniform rows are scattered"
        self.device.forward(plan)

    def sample(self, plan: StepPlan, masks: Mapping[int, MaskState], width: int) -> None:
        self.device.sample(plan, masks, width)

    def output(self, plan: StepPlan) -> Sequence[Output]:
        self.device.clock.wait(lambda: self.device.copied >= plan.step)
        return self.device.read(plan.step)
