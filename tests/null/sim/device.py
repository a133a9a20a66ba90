"""The simulated device of one rank: p stages with latencies, the true state in slots, late outputs."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Mapping, NamedTuple, Sequence

from tests.null.sim.clock import Clock
from tests.null.sim.model import VOCAB, chain, logprob, sample
from thalweg.cache.page_allocator import PageAllocator
from thalweg.core.agreement import AgreedStep
from thalweg.core.plan import NULL_PAGE, Bind, GrammarState, Output, Row, StepPlan, TokenLogprob
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.scheduler.requests import sampling_needs


@dataclass
class Slot:
    """What a stage knows of a running request. at: positions that have KV. parents: of the drafts, see `core.tree`."""

    bind: Bind
    tokens: tuple[int, ...]
    at: int
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    done: bool = False
    pages: list[int] = field(default_factory=list)

    def columns(self, size: int) -> list[int]:
        """Where the KV of each position lies."""
        return [page * size + i for page in self.pages for i in range(size)]

    def hashes(self) -> list[int]:
        """Of the whole prefix of each token, and of each draft behind its path."""
        found = chain(self.bind.salt, self.tokens)
        root = len(found) - 1
        for draft, parent in zip(self.drafts, self.parents, strict=True):
            found.append(hash((found[root + parent], draft)))
        return found

    def straighten(self, kv: list[int], nodes: tuple[int, ...], size: int) -> None:
        """The KV of accepted drafts moves to where that of a chain stands."""
        at, root = self.columns(size), len(self.tokens) - 1
        for ahead, node in enumerate(nodes, 1):
            kv[at[root + ahead]] = kv[at[root + node]]


class Work(NamedTuple):
    """What A made of one row: hashes as of `Slot`, as far as they were computed, and its prompt_logprobs."""

    hashes: list[int]
    prompt_logprobs: tuple[TokenLogprob, ...]


class News(NamedTuple):
    slot: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    parents: tuple[int, ...]
    done: bool


class Device:
    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        stages: int,
        depth: int,
        allocator: PageAllocator,
        tree: TreeShape = CHAIN,
    ) -> None:
        self.clock, self.rng, self.stages, self.allocator, self.tree = clock, rng, stages, allocator, tree
        self.page = allocator.page_size
        self.ring = self.ring_size(depth)
        self.plans: list[StepPlan | None] = [None] * self.ring
        self.masks: list[tuple[int, Mapping[int, GrammarState]]] = [(-1, {})] * self.ring
        self.outputs: list[tuple[int, list[Output]]] = [(-1, [])] * self.ring
        self.pinned: list[tuple[int, list[Output]]] = [(-1, [])] * self.ring
        self.slots: list[dict[int, Slot]] = [{} for _ in range(stages)]
        self.kv = [[0] * (allocator.num_pages + 1) * self.page for _ in range(stages)]
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
        self.proposed = 0  # drafts

    def ring_size(self, depth: int) -> int:
        return depth + 1

    # ---- what the worker calls

    def forward(self, plan: StepPlan) -> None:
        """A: one entry a stage; returns at once."""
        self.plans[plan.step % self.ring] = plan
        for stream in self.streams:
            stream.append(("A", plan, 0))
            self._pump()

    def sample(self, plan: StepPlan, masks: Mapping[int, GrammarState], width: int) -> None:
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
                if stage == 0 and self.finished_b < plan.published_step:
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
            for heard in range(self.heard[stage] + 1, plan.published_step + 1):
                for news in self.published[heard]:
                    x = slots[news.slot]
                    x.tokens, x.drafts, x.parents, x.done = news.tokens, news.drafts, news.parents, news.done
                    x.at = len(x.tokens) - 1
        self.heard[stage] = max(self.heard[stage], plan.published_step)
        for bind in plan.binds:
            slots[bind.slot] = Slot(bind, bind.tokens, bind.computed)
        for append in plan.appends:
            x = slots[append.slot]
            assert append.first_entry == len(x.pages), "an append leaves a hole in the page table, or overwrites"
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
        assert len(x.drafts) <= row.num_drafts or not row.samples, "more drafts than the plan has room for"
        start, n = x.at, row.n - row.num_drafts + len(x.drafts) * row.samples
        assert not row.samples or start + n - len(x.drafts) == len(x.tokens), "a row starts at the wrong position"
        assert start <= row.start and (row.samples or start == row.start), "the plan's start is no upper bound"
        n = self.cut(n, x, start)
        known = (x.tokens + x.drafts)[: start + n]
        hashes = x.hashes()[: start + n]
        assert len(known) == start + n and n > 0, "an unknown token was computed"
        assert start + n <= plan.max_kv_len, "a row reaches further than the plan says"
        assert all(p != NULL_PAGE and self.allocator.ref_counts[p] for p in x.pages), (
            "a row in flight uses a page that nobody leases"
        )
        at = x.columns(self.page)
        assert len(at) >= len(hashes), "beyond the page table"
        assert [kv[i] for i in at[:start]] == hashes[:start], "another prefix's KV"
        write.extend(list(zip(at, hashes, strict=False))[start:])
        if not row.samples:
            x.at += n
        scored = range(row.prompt_logprobs_start, row.prompt_logprobs_stop)
        assert all(start <= q < start + n for q in scored), "a score of a position that the row does not compute"
        return Work(
            hashes,
            tuple(
                logprob(hashes[q], known[q + 1] if q + 1 < len(known) else x.tokens[q + 1], row.prompt_logprobs_top_k)
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
            if work is None or not row.samples:
                outputs.append(Output(prompt_logprobs=work.prompt_logprobs if work else (), done=work is None))
                continue
            self._check_needs(plan, x)
            outputs.append(self._accept(x, work, masks.get(row.uid), width))
            news.append(News(row.slot, x.tokens, x.drafts, x.parents, x.done))
        self.lost = self.lost or step == self.fails
        if self.lost:
            outputs = [output._replace(drafter_failed=True) for output in outputs]
        self.published[step], self.outputs[step % self.ring] = news, (step, outputs)

    def _check_needs(self, plan: StepPlan, x: Slot) -> None:
        for has, wanted in zip(plan.needs, sampling_needs(x.bind.params), strict=True):
            assert has >= wanted, "B of this step does not compute what a row needs"

    def _accept(self, x: Slot, work: Work, mask: GrammarState | None, width: int) -> Output:
        bind, hashes, told = x.bind, work.hashes, x.parents if self.tree.is_tree else ()
        state = None if mask is None else (mask.num_tokens, mask.drafts, mask.parents)
        assert not (bind.has_grammar and state) or state == (len(x.tokens), x.drafts, told), "a mask of another state"
        got: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        nodes: tuple[int, ...] = (0,)
        verified = range(1, len(hashes) - len(x.tokens) + 1)
        while True:
            h, at = hashes[len(x.tokens) - 1 + nodes[-1]], len(x.tokens) + len(got)
            last = ((mask.last_token, *mask.drafts)[nodes[-1]] if mask else 1) if bind.has_grammar else None
            got += (sample(h, bind.seed, last, self._banned(bind, at)),)
            if bind.params.logprobs is not None:
                logprobs += (logprob(h, got[-1], bind.params.logprobs),)
            x.done = got[-1] in bind.stop_ids or at + 1 >= bind.end
            children = (i for i in verified if (x.parents[i - 1], x.drafts[i - 1]) == (nodes[-1], got[-1]))
            following = 0 if x.done else next(children, 0)
            if not following:
                break
            nodes += (following,)
        self.accepted += len(got)
        for kv in self.kv:  # at once, on every stage: when the step has retired its pages may be another's
            x.straighten(kv, nodes[1:], self.page)
        x.tokens += got
        x.at = len(x.tokens) - 1
        x.drafts, x.parents = self._propose(x, width)
        self.proposed += len(x.drafts)
        path, told = sum(1 << node - 1 for node in nodes[1:]), x.parents if self.tree.is_tree else ()
        return Output(got, x.drafts, x.done, logprobs, work.prompt_logprobs, parents=told, accepted_mask=path)

    def _propose(self, x: Slot, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A drafter is right most of the time, and may make fewer than asked. It makes its own entries of the last
        token and of its drafts; of a dynamic tree, of what it grows from. → drafts and their parents.
        """
        bind, parents = x.bind, list[int]()
        paths: list[tuple[int, ...]] = [()]
        if self.lost:
            return (), ()
        grown = self.tree.num_expanded() if self.tree.dynamic and self.tree.is_tree_step(1 + width) else 0
        entries = 0 if x.done or not width else min(len(x.tokens) + max(width - 1, grown), bind.end)
        assert len(x.pages) * self.page >= entries, "a draft without a page for its entry"
        for made in range(self.rng.randint(0, width)):
            parent = self._branch(paths, parents) if self.tree.is_tree else made
            tokens = x.tokens + paths[parent]
            right = sample(
                chain(bind.salt, tokens)[-1],
                bind.seed,
                tokens[-1] if bind.has_grammar else None,
                self._banned(bind, len(tokens)),
            )
            draft = right if self.rng.random() < 0.7 else self.rng.randrange(1, VOCAB)
            siblings = {path[-1] for path, own in zip(paths[1:], parents, strict=True) if own == parent}
            while self.tree.is_tree and draft in siblings:
                draft = self.rng.randrange(1, VOCAB)
            paths.append((*paths[parent], draft))
            parents.append(parent)
        return tuple(path[-1] for path in paths[1:]), tuple(parents)

    def _branch(self, paths: list[tuple[int, ...]], parents: list[int]) -> int:
        """A node that may have another child."""
        deepest, branches = self.tree.max_depth, self.tree.branching
        return self.rng.choice(
            [i for i, path in enumerate(paths) if len(path) < deepest and parents.count(i) < branches]
        )

    @staticmethod
    def _banned(bind: Bind, position: int) -> Sequence[int]:
        return bind.stop_ids if position - bind.prompt_len < bind.params.min_tokens else ()


class SimWorker:
    """The `Worker` of `engine/loop.py` over a simulated device."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def forward(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        assert agreed is None or agreed.rows >= len(plan.rows) and agreed.tokens >= plan.tokens
        sizes = [row.n for row in plan.rows]
        uniform = next((i for i, n in enumerate(sizes) if n != sizes[0]), len(sizes))
        assert uniform >= sum(row.n == sizes[0] and row.num_drafts > 0 for row in plan.rows), (
            "uniform rows are scattered"
        )
        self.device.forward(plan)

    def sample(self, plan: StepPlan, masks: Mapping[int, GrammarState], width: int) -> None:
        self.device.sample(plan, masks, width)

    def output(self, plan: StepPlan) -> Sequence[Output]:
        self.device.clock.wait(lambda: self.device.copied >= plan.step)
        return [output._replace(drafts=(), parents=(), drafter_failed=False) for output in self.device.read(plan.step)]

    def add_drafts(self, plan: StepPlan, outputs: Sequence[Output]) -> Sequence[Output]:
        return self.device.read(plan.step)
