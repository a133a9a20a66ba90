"""Captured tree steps publish what eager steps do: verification, accepting a path, draft KV, building the next trees.

CUDA graphs are simulated by a recorder of PyTorch operations. A capture that synchronizes with the device or holds host
values fails.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.cpu.recorder import GraphPool, Strict, storage
from tests.cpu.test_captured_drafts import (
    Far,
    at_work,
    choose_draft_lengths,
    counted,
    graphs,
    of_kind,
    recorded_outputs,
    watch,
)
from tests.cpu.test_speculation import engine, prompts, run, unrecorded
from thalweg.core.plan import Output, Row, SamplingNeeds, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import TreeShape
from thalweg.engine.local import LocalEngine
from thalweg.runner.captured import tree_shapes
from thalweg.runner.draft_graphs import NO_DRAFT_GRAPHS
from thalweg.sampling.rejection import RejectionSampling
from thalweg.spec.tree import TreeDrafter

assert unrecorded and graphs  # fixtures of this module, too
SLOTS, SHAPE = 7, TreeShape(3, 3, 7)
STEPS, WIDTHS = (1, 2, 16), (1, 3, SHAPE.num_drafts)  # of one draft there is no tree
DRAFTS, LENGTHS = (0, 1, 3, SHAPE.num_drafts, SHAPE.num_drafts, SHAPE.num_drafts), (5, 40)
COUNTS = ("get", "sample", "extend", "propose")


def made_of(
    graphs: Any, recorded: bool, pool: GraphPool, shares_topk: bool = False
) -> tuple[LocalEngine, dict[str, int]]:
    """An engine whose A is recorded, and B, too, or not; how often each is replayed."""
    fields = {"max_running_requests": SLOTS + 1, "max_steps_in_flight": 2, "chunked_prefill_size": 96}
    made = engine(SHAPE.num_drafts, tree=SHAPE, index_share_for_mtp_iteration=shares_topk, **fields)
    made.loop.scheduler.kv_cache.free_slots.remove(SLOTS)  # nobody's: what fills recordings up
    runner, counts = made.runner, dict.fromkeys(COUNTS, 0)
    assert isinstance(runner.drafting.drafter, TreeDrafter)
    capture = graphs.Capture(runner, runner.slots.context, SLOTS, pool, True)
    with torch.inference_mode():
        for shape in tree_shapes(STEPS, WIDTHS, SHAPE, SLOTS):
            capture.trees(*shape)
    runner.graphs, trees = capture.captured(), capture.steps
    captured: Any = runner.graphs
    assert capture.has_drafts
    sizes = sorted((one.rows, one.query) for one in trees)
    assert sizes == [(1, 4), (1, 8), (2, 4), (2, 8), (7, 4), (7, 8)]
    places: list[tuple[Any, str]] = [
        (captured, "get"),
        (captured.drafts, "extend"),
        (captured.drafts, "propose"),
    ]
    for owner, name in [*places, *((grove, "sample") for grove in trees)]:
        watch(owner, name, counts)
    if not recorded:
        captured.drafts = NO_DRAFT_GRAPHS
        for grove in trees:
            grove.graphs.clear()
    return made, counts


TAPE = GraphPool()


@pytest.fixture(scope="module")
def whole(graphs: Any) -> tuple[LocalEngine, dict[str, int]]:
    return made_of(graphs, True, TAPE)


@pytest.mark.parametrize("shares_topk", [False, True])
def test_recorded_steps_publish_what_eager_ones_do(
    graphs: Any, whole: tuple[LocalEngine, dict[str, int]], shares_topk: bool
) -> None:
    """With penalties and masks ahead of what is recorded, and log-probabilities behind it."""
    made, counts = made_of(graphs, True, GraphPool(), True) if shares_topk else whole
    tokens, steps = at_work(made, 3, DRAFTS, LENGTHS)
    eager, none = made_of(graphs, False, GraphPool(), shares_topk)
    wanted, published = at_work(eager, 3, DRAFTS, LENGTHS)
    assert tokens == wanted and steps == published
    stats = made.loop.stats()
    assert stats.accepted_tokens > 20 and not stats.drafter_failures
    assert min(counts.values()) > 15, counts
    assert none["get"] > 15 and not none["sample"], none


def test_tokens_are_those_of_plain_decoding(whole: tuple[LocalEngine, dict[str, int]]) -> None:
    plain = engine(0)
    for fields in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}):
        params = SamplingParams(max_tokens=12, ignore_eos=True, **fields)  # type: ignore[arg-type]
        assert run(whole[0], prompts(3, 60), params) == run(plain, prompts(3, 60), params)


def test_another_rule_than_was_recorded_is_not_replayed(whole: tuple[LocalEngine, dict[str, int]]) -> None:
    runner = whole[0].runner
    grove: Any = runner.graphs.get(_plan(1))
    with torch.inference_mode():
        assert grove.sample(1, SamplingNeeds(random=True), runner.sampler) is not None
        assert grove.sample(1, SamplingNeeds(random=True), RejectionSampling(runner.sampler)) is None


def test_rows_that_fill_a_bucket_are_padding(whole: tuple[LocalEngine, dict[str, int]]) -> None:
    """Rows that there are not change nothing of any slot, nor of a page but the null page."""
    runner = whole[0].runner
    grove: Any = runner.graphs.get(_plan(3))
    assert grove.rows == SLOTS
    runner.slots.reset()
    slots, planes = runner.slots.ints_SI.clone(), {name: held.clone() for name, held in runner.planes.bytes.items()}
    with torch.inference_mode():
        _, slot_E, _, seen = grove.forward(_plan(3))
        found = grove.sample(3, SamplingNeeds(), runner.sampler)
        assert runner.graphs.drafts.extend(seen.compacted)
    assert slot_E.tolist() == [0, 1, 2] and not seen.compacted.batch.real_T.any()
    assert found.count_E.tolist() == [0] * 3 and found.done_E.all()
    assert torch.equal(runner.slots.ints_SI, slots)
    assert all(torch.equal(held[1:], planes[name][1:]) for name, held in runner.planes.bytes.items())


def _plan(rows: int) -> StepPlan:
    return StepPlan(
        0, 0, tuple(Row(slot, slot, 9, 1 + SHAPE.num_drafts, SHAPE.num_drafts, True) for slot in range(rows))
    )


def test_no_graph_reads_memory_that_another_may_overwrite(whole: tuple[LocalEngine, dict[str, int]]) -> None:
    """The memory of the pool: accept finds there what A of its own step has left, others find nothing; and what is
    published lies elsewhere.
    """
    recordings = TAPE.recordings
    pool = set[int]().union(*(one.made for one in recordings))
    first: dict[str, Strict] = {}
    reading = list[int]()
    for one in recordings:
        a = first.setdefault(one.block, one)
        assert one is a or not one.read & pool - a.made, one.block
        reading.append(bool(one is not a and one.read & a.made))
    assert sum(reading) == 18, "three kinds of draws of three numbers of rows, and two of nodes"
    graphs: Any = whole[0].runner.graphs
    published = [x for grove in graphs.graphs for x in (*grove.out, *grove.compacted.paths, grove.compacted.hidden_TX)]
    published += [x for building in graphs.drafts.proposes for x in building.out]
    assert not pool & {storage(one) for one in published}


def test_one_draft_is_a_chains_graphs_among_trees(graphs: Any) -> None:
    """Whatever the steps before and behind it had: the drafter proposes none by itself, and what is published is what
    an eager B publishes.
    """
    recorded, eager = among_trees(graphs), among_trees(graphs)
    runner: Any = recorded.runner
    chains, alone = counted(recorded), {"propose": 0}
    watch(runner.drafting.drafter, "propose", alone)
    assert {one.query for one in of_kind(runner, "verify")} == {2}
    assert {(one.rows, one.query) for one in of_kind(runner, "tree")} == {(4, 3), (4, 4)}
    runner = eager.runner
    runner.drafting.drafter.propose = Far(runner.drafting.drafter).propose
    runner.graphs.drafts = NO_DRAFT_GRAPHS
    for one in (*of_kind(runner, "verify"), *of_kind(runner, "tree")):
        one.graphs.clear()
    assert published(recorded) == published(eager)
    assert chains["accept"] > 5 and min(chains["extend"], chains["propose"]) > 10, chains
    assert not alone["propose"], alone


def among_trees(graphs: Any) -> LocalEngine:
    """All of whose steps are recorded, of one draft too."""
    shape, told = TreeShape(2, 2, 3), list[tuple[int, int]]()
    made = engine(shape.num_drafts, tree=shape, max_running_requests=5, max_steps_in_flight=2, chunked_prefill_size=96)
    made.loop.scheduler.kv_cache.free_slots.remove(4)
    made.runner.drafting.deferred.copies_tensors = True
    graphs.capture_steps(
        made.runner, (8,), (), False, made.runner.slots.context, 4, lambda *one: told.append(one), (1, 2, 3)
    )
    assert told == [(1 + i, len(told)) for i in range(len(told))], "the bar ends at its end"
    return made


def published(made: LocalEngine) -> list[tuple[Output, ...]]:
    """Of steps with one to three drafts."""
    rng = random.Random(2)
    choose_draft_lengths(made, lambda: rng.choice((1, 1, 2, 3)))
    steps = recorded_outputs(made)
    for fields in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}):
        run(made, prompts(4, 30), SamplingParams(max_tokens=12, ignore_eos=True, **fields))  # type: ignore[arg-type]
    assert made.loop.stats().accepted_tokens > 20 and not made.loop.stats().drafter_failures
    return steps


def test_how_many_rows_are_recorded() -> None:
    def rows(steps: tuple[int, ...], query: int, requests: int = 256) -> list[int]:
        found = tree_shapes(steps, [query - 1], TreeShape(4, 4, 63), requests)
        assert {own for _, own in found} == {query}
        return [rows for rows, _ in found]

    steps = (1, 2, 4, *range(8, 257, 8))
    assert rows(steps, 16) == [16, 8, 4, 2, 1], "as many tokens as the largest step"
    assert rows(steps[-1:], 16) == [16] and rows(steps, 64) == [8, 4, 2, 1]
    assert rows((1, 2, 4), 16) == [4, 2, 1] and rows((1, 3), 4) == [3, 1]
    assert rows(steps, 16, 10) == [10, 4, 2, 1] and rows((1, 2), 16, 1) == [1], "no more than there may be requests"
    made = tree_shapes((1, 2, 4), (0, 1, 3, 7), TreeShape(4, 4, 7), 4)
    assert made == [(4, 8), (4, 4), (2, 8), (2, 4), (1, 8), (1, 4)], (
        "the largest first; up to one draft there are no trees"
    )
    assert not tree_shapes((), (3,), TreeShape(4, 4, 7), 4) and not tree_shapes((1, 2), (3,), TreeShape(), 4)
