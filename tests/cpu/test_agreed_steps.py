"""Data-parallel ranks run the same passes with the same padded shapes, whatever rows each of them has."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.cpu.batches import run_step
from tests.cpu.test_speculation import engine, unrecorded
from thalweg.core.agreement import AgreedStep, RanksDisagree, RankStep, coordinate_step, rank_step_of
from thalweg.core.plan import Bind, PageAppend, Row, SamplingNeeds, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.engine.local import LocalEngine
from thalweg.runner.runner import Runner

assert unrecorded  # a fixture of this module, too
GREEDY = SamplingParams(temperature=0.0)
TREE = TreeShape(2, 2, 3)

Pass = tuple[str, int]


@dataclass
class Rank:
    """One rank: a runner whose passes are counted, and a plain schedule of its own requests."""

    made: LocalEngine
    rng: random.Random
    passes: list[Pass] = field(default_factory=list)
    running: dict[int, list[int]] = field(default_factory=dict)  # slot → tokens known, drafts, prompt tokens left
    outputs: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner, drafter = self.runner, self.runner.drafting.drafter
        model: Any = runner.model
        for owner, names in (
            (model, ("forward", "logits")),
            (getattr(drafter, "head", None), ("forward", "write_kv", "logits")),
        ):
            for name in names if owner is not None else ():
                watch(owner, name, "draft " if owner is not model else "", self.passes)
        runner.forward_model = model
        if hasattr(drafter, "head"):
            drafter.steps = drafter.head  # type: ignore[attr-defined]

    @property
    def runner(self) -> Runner:
        return self.made.runner

    def plan(self, step: int, arrivals: int, num_drafts: int, tree: TreeShape) -> StepPlan:
        """Decodes what runs, or goes on with prompts of this many requests."""
        rows, binds, appends = list[Row](), list[Bind](), list[PageAppend]()
        for _ in range(arrivals):
            slot = next(i for i in range(3) if i not in self.running)
            tokens = tuple(self.rng.randrange(5, 900) for _ in range(self.rng.choice((3, 20, 70))))
            binds.append(Bind(slot, tokens, len(tokens), 0, 300, 7, (), GREEDY))
            pages = range(1 + slot * 6, 7 + slot * 6)
            appends.append(PageAppend(slot, 0, tuple(pages)))
            self.running[slot] = [len(tokens), 0, len(tokens)]
        for slot, state in sorted(self.running.items(), key=lambda item: item[1][2]):
            known, drafts, left = state
            score = (0, known - 1) if left and self.rng.random() < 0.3 else (0, 0)
            n = left or 1 + drafts
            rows.append(Row(slot, slot, known - (left or 1), n, drafts if not left else 0, True, *score))
        reach = max((row.start + row.n for row in rows), default=0)
        return StepPlan(step, 0, tuple(rows), tuple(binds), tuple(appends), False, num_drafts, SamplingNeeds(), reach)

    def run(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        runner = self.runner
        width = plan.num_drafts if agreed is None else agreed.num_drafts
        outputs = run_step(runner, plan, agreed, width)
        for row, output in zip(plan.rows, outputs, strict=True):
            self.outputs.append(output.tokens)
            self.running[row.slot] = [int(runner.slots.length[row.slot]), len(output.drafts), 0]
            if self.rng.random() < 0.15 or self.running[row.slot][0] > 200:
                del self.running[row.slot]


def watch(owner: Any, name: str, prefix: str, passes: list[Pass]) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def watched(*args: Any) -> Any:
        passes.append((prefix + name, len(getattr(args[0], "ids_T", args[0]))))
        return real(*args)

    setattr(owner, name, watched)


def rank_of(seed: int, tree: TreeShape = CHAIN, drafts: int = 3, **fields: Any) -> Rank:
    return Rank(engine(drafts, max_running_requests=4, tree=tree, **fields), random.Random(seed))


def steps(ranks: list[Rank], count: int, seed: int, tree: TreeShape = CHAIN, bug: str = "") -> None:
    """Runs a group. Raises AssertionError at the first step whose passes differ."""
    rng = random.Random(seed)
    for step in range(count):
        wish = rng.choice((0, 0, 0, 3)) if rng.random() < 0.7 else rng.choice((1, 2, 3))
        plans = []
        for number, rank in enumerate(ranks):
            idle = number == 1 and step % 7 < 4 and not rank.running
            free = 3 - len(rank.running)
            arrivals = 0 if idle or rng.random() < 0.6 else rng.randrange(1 + free)
            plans.append(rank.plan(step, arrivals, wish if rng.random() < 0.8 else 0, tree))
        rank_steps = [rank.runner.rank_step(plan) for rank, plan in zip(ranks, plans, strict=True)]
        agreed = coordinate_step(rank_steps)
        if bug.startswith("failed drafter") and step == 9:
            fail_once(ranks[1].runner.drafting.drafter)
        for number, (rank, plan) in enumerate(zip(ranks, plans, strict=True)):
            rank.passes.clear()
            rank.run(plan, planted(agreed, rank_steps[number], bug) if number == 1 else agreed)
            if bug == "idle rank skips" and number == 1 and not plan.rows:
                rank.passes.clear()
            if bug == "failed drafter stops" and rank.runner.drafting.drafter_failed:
                rank.passes[:] = [one for one in rank.passes if not one[0].startswith("draft")]
        if bug:
            ranks[1].runner.pass_checksum = ranks[0].runner.pass_checksum  # the passes themselves must differ
        seen = [rank.passes for rank in ranks]
        assert all(passes == seen[0] for passes in seen), (step, plans, seen)


def planted(agreed: AgreedStep, own: RankStep, bug: str) -> AgreedStep:
    """What a rank runs that decides by its own rows."""
    match bug:
        case "own tokens":
            return agreed._replace(tokens=own.tokens)
        case "own drafts":
            return agreed._replace(num_drafts=own.num_drafts)
        case "own rows of drafts":
            return agreed._replace(sampled_rows=own.sampled_rows)
        case "own deferred tokens":
            return agreed._replace(written_after=own.written_if_extended if agreed.extends else own.written_if_deferred)
        case "own deferral":
            return agreed._replace(extends=agreed.extends and own.tokens > own.rows)
        case "own score passes":
            return agreed._replace(prompt_logprobs_passes=own.prompt_logprobs_passes)
        case "own slots to write":
            return agreed._replace(written_before=own.written_before)
    return agreed


def fail_once(drafter: Any) -> None:
    real = drafter.extend

    def fail(*args: Any) -> None:
        drafter.extend = real
        raise RuntimeError("on purpose")

    drafter.extend = fail


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_an_idle_rank_runs_the_same_passes(tree: TreeShape) -> None:
    ranks = [rank_of(seed, tree) for seed in range(3)]
    steps(ranks, 60, 1, tree)
    assert sum(len(tokens) for rank in ranks for tokens in rank.outputs) > 100
    assert len({rank.runner.pass_checksum for rank in ranks}) == 1


def test_a_failed_drafter_runs_padded_passes_until_all_know() -> None:
    ranks = [rank_of(seed) for seed in range(3)]
    steps(ranks, 30, 2, bug="failed drafter")
    assert all(rank.runner.drafting.drafter_failed for rank in ranks)
    assert not any(name.startswith("draft") for rank in ranks for name, _ in rank.passes)


BUGS = (
    "idle rank skips", "own tokens", "own drafts", "own rows of drafts", "own deferred tokens", "own deferral", "own score passes",
    "own slots to write", "failed drafter stops",
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_rank_that_decides_by_its_own_rows_is_noticed(bug: str) -> None:
    """Each planted bug makes a rank run other passes than the other rank."""
    ranks = [rank_of(seed) for seed in range(2)]
    with pytest.raises(AssertionError):
        steps(ranks, 200, 3, bug=bug)


def test_one_rank_alone_computes_what_it_does_without_agreement() -> None:
    alone, agreed = rank_of(5), rank_of(5)
    rng = random.Random(4)
    for step in range(25):
        wish, arrivals = rng.choice((0, 0, 2, 3)), rng.choice((0, 0, 1))
        for rank, given in ((alone, False), (agreed, True)):
            plan = rank.plan(step, min(arrivals, 3 - len(rank.running)), wish, CHAIN)
            rank.run(plan, coordinate_step([rank.runner.rank_step(plan)]) if given else None)
    assert alone.passes == agreed.passes and alone.outputs == agreed.outputs and len(alone.outputs) > 20


def test_one_record_is_agreed_as_several_like_it() -> None:
    rng = random.Random(1)
    for _ in range(200):
        shapes = [rng.choice(((1, 0), (3, 2), (3, 0), (4, 3))) for _ in range(rng.randrange(4))]
        rows = tuple(
            Row(i, i, 9, n, drafts, rng.random() < 0.8, 0, rng.choice((0, 0, 600)))
            for i, (n, drafts) in enumerate(shapes)
        )
        plan = StepPlan(0, 0, rows, num_drafts=rng.randrange(3))
        rank_step = rank_step_of(plan)._replace(
            has_drafter=rng.random() < 0.8,
            written_before=rng.randrange(3),
            written_if_deferred=2,
            written_if_extended=rng.randrange(5),
        )
        alone, several = coordinate_step([rank_step]), coordinate_step([rank_step, rank_step])
        assert alone.may_prefill, "one rank has nobody to wait for"
        assert alone == several._replace(ranks=1, may_prefill=True)
        assert rank_step.tokens == plan.tokens and rank_step.sampled_per_row == plan.sampled_per_row
        whole = (
            row.n == 1 + row.num_drafts and row.samples and row.prompt_logprobs_start == row.prompt_logprobs_stop
            for row in rows
        )
        assert rank_step.is_verify == all(whole)
        assert rank_step.is_uniform == all(row.n == plan.sampled_per_row for row in rows)


def test_records_of_another_step_or_of_other_passes_are_refused() -> None:
    plan = StepPlan(3, 0)
    rank_step = rank_step_of(plan)
    assert coordinate_step([rank_step, rank_step]).tokens == 0
    for other in (rank_step._replace(step=2), rank_step._replace(epoch=1), rank_step._replace(pass_checksum=9)):
        with pytest.raises(RanksDisagree, match="rank 1"):
            coordinate_step([rank_step, other])


def test_prompts_are_computed_on_many_ranks_together() -> None:
    def may_prefill(*waits: int, rows: int = 1) -> bool:
        return coordinate_step([RankStep(1, rows=rows, tokens=rows, prefill_wait=wait) for wait in waits]).may_prefill

    assert may_prefill(1, 0) and may_prefill(1, 1, 0, 0)
    assert not may_prefill(1, 0, 0, 0) and not may_prefill(3, 0, 0)
    assert may_prefill(4, 0, 0, 0), "it has waited three steps"
    assert may_prefill(1, 0, 0, 0, rows=0), "no rank decodes"
