"""Captured steps with drafts publish what eager steps do, for any draft length, rows and requests.

CUDA graphs are simulated, see `tests.cpu.recorder`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.cpu.recorder import POOLS, Strict, record_instead_of_capturing, storage
from tests.cpu.test_speculation import JSON, engine, prompts, run, unrecorded
from thalweg.batch.slots import upload
from thalweg.core.grammar import NO_GRAMMAR
from thalweg.core.plan import Output, Row, SamplingNeeds, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.runner import graphs as runner_graphs
from thalweg.runner.captured import PADDING_OFFSET, chain_shapes
from thalweg.runner.draft_graphs import NO_DRAFT_GRAPHS
from thalweg.runner.drafting import DrafterError
from thalweg.sampling.rejection import RejectionSampling
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.drafter import DraftOutput, DraftRequest

assert unrecorded  # a fixture of this module, too


def of_kind(runner: Any, kind: str) -> list[Any]:
    """The captured steps of one kind."""
    return [graph for graph in runner.graphs.graphs if graph.key[0] == kind]


ROWS, WIDEST, SLOTS = (1, 4, 16), 3, 7
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 50, "seed": 4},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 0.0, "stop_token_ids": (17, 30, 31)},
]


@pytest.fixture(scope="module")
def graphs() -> Iterator[Any]:
    """`runner.graphs` without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        record_instead_of_capturing(patch)
        yield runner_graphs


class Far:
    """Drafts as if contexts were as long as they may be, as graphs do: sums over more padding round otherwise."""

    def __init__(self, drafter: AutoregressiveDrafter) -> None:
        self.propose_ = drafter.propose

    def propose(self, asked: DraftRequest, width: int, slots: Any, planes: Any) -> DraftOutput | None:
        return self.propose_(DraftRequest(asked.slot_E, slots.context, asked.needs), width, slots, planes)


def made_of(graphs: Any, recorded: bool, **fields: Any) -> LocalEngine:
    """An engine whose A is recorded, and B, too, or not."""
    made = engine(WIDEST, max_running_requests=SLOTS + 1, **fields)
    runner = made.runner
    drafter = runner.drafting.drafter
    assert isinstance(drafter, AutoregressiveDrafter)
    runner.drafting.deferred.copies_tensors = True
    graphs.capture_steps(
        runner, ROWS, (), False, runner.slots.context, SLOTS, lambda done, count: None, range(1, 1 + WIDEST)
    )
    # rows of one request in a pass: attention must not store keys that others read in the same launch
    assert all(graph.captured_pass.batch.shares_slots for graph in runner.graphs.graphs)
    assert of_kind(runner, "verify") and runner.graphs.drafts is not NO_DRAFT_GRAPHS  # type: ignore[attr-defined]
    if not recorded:
        drafter.propose = Far(drafter).propose  # type: ignore[method-assign]
        for verified in of_kind(runner, "verify"):  # type: ignore[attr-defined]
            verified.graphs.clear()
        runner.graphs.drafts = NO_DRAFT_GRAPHS  # type: ignore[misc]
    return made


def choose_draft_lengths(made: LocalEngine, choose: Callable[[], int]) -> None:
    """From now on the policy's choice is this one."""
    policy: Any = made.loop.scheduler.draft_length
    policy.choose = lambda sampling, most: choose()


def recorded_outputs(made: LocalEngine) -> list[tuple[Output, ...]]:
    """The outputs of every step from now on."""
    runner: Any = made.runner
    steps, add_drafts = list[tuple[Output, ...]](), runner.add_drafts

    def record(*arguments: Any) -> tuple[Output, ...]:
        steps.append(tuple(add_drafts(*arguments)))
        return steps[-1]

    runner.add_drafts = record
    return steps


def at_work(
    made: LocalEngine, seed: int, drafts: Sequence[int] = (0, 1, 2, 3, 3), lengths: tuple[int, int] = (1, 30)
) -> tuple[list[list[int]], list[tuple[Output, ...]]]:
    """Requests that come and go, of so many drafts now and then: their tokens, and all that was published."""
    run(
        made, [[0, 5]], SamplingParams(temperature=0.0, max_tokens=2), JSON
    )  # a grammar is compiled beside the steps, whenever that is done
    rng = random.Random(seed)
    widths = random.Random(seed + 1)
    choose_draft_lengths(made, lambda: widths.choice(drafts))
    steps = recorded_outputs(made)
    waiting = [
        (prompt, SamplingParams(max_tokens=rng.randint(*lengths), ignore_eos=i % 6 > 0, **KINDS[i % len(KINDS)]), i)
        for i, prompt in enumerate(prompts(7, 80))
    ]
    answers: dict[int, list[int]] = {}
    while waiting or not made.idle:
        if waiting and (made.idle or rng.random() < 0.2):
            prompt, params, i = waiting.pop()
            answers |= {uid: [] for uid in made.submit(prompt, params, grammar=NO_GRAMMAR if i % 6 else JSON)}
        for delta in made.step():
            answers[delta.uid] += delta.tokens
    return list(answers.values()), steps


@pytest.mark.parametrize(
    ("depth", "acceptance", "shares"),
    [(2, "gumbel-max", False), (1, "rejection-sampling", False), (2, "gumbel-max", True)],
)
def test_recorded_steps_publish_what_eager_ones_do(graphs: Any, depth: int, acceptance: str, shares: bool) -> None:
    fields = {"max_steps_in_flight": depth, "speculative_acceptance": acceptance, "chunked_prefill_size": 96}
    fields["index_share_for_mtp_iteration"] = shares
    whole = made_of(graphs, True, **fields)
    counts = counted(whole)
    tokens, steps = at_work(whole, 3)
    wanted, eager = at_work(made_of(graphs, False, **fields), 3)
    assert tokens == wanted and steps == eager
    assert isinstance(whole.runner.sampler, RejectionSampling) == (acceptance == "rejection-sampling")
    stats = whole.loop.stats()
    assert stats.accepted_tokens > 15 and not stats.drafter_failures
    assert all(count > 10 for count in counts.values()), counts


def counted(made: LocalEngine) -> dict[str, int]:
    """How often each of these was replayed from now on."""
    graphs, counts = made.runner.graphs, dict.fromkeys(("accept", "extend", "propose"), 0)
    watch(graphs.drafts, "extend", counts)
    watch(graphs.drafts, "propose", counts)
    for verified in of_kind(made.runner, "verify"):  # type: ignore[attr-defined]
        watch(verified, "sample", counts, "accept")
    return counts


def watch(owner: Any, name: str, counts: dict[str, int], count: str = "") -> None:
    """Counts under its own name or another how often it did something from now on."""
    real = getattr(owner, name)

    def watched(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        counts[count or name] += found is not None and found is not False
        return found

    setattr(owner, name, watched)


PLACES = {
    "its step": ("CapturedPass", "_forward", False),
    "its draw": ("TokenStep", "_sample_tokens", False),
    "accept": ("VerifyStep", "_sample_tokens", True),
    "what it learns": ("DraftExtendGraph", "_extend", True),
    "a draft": ("DraftStepGraph", "_draft", True),
}


@pytest.mark.parametrize(("kind", "method", "drafters"), PLACES.values(), ids=PLACES)
def test_only_drafter_errors_switch_the_drafter_off(
    graphs: Any, kind: str, method: str, drafters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, raised = engine(WIDEST, max_running_requests=SLOTS + 1), RuntimeError("CUDA error: on purpose")
    context = made.runner.slots.context

    def fails(*args: Any) -> None:
        raise raised

    monkeypatch.setattr(getattr(graphs, kind), method, fails)
    for error, blamed in ((raised, drafters), (torch.OutOfMemoryError("CUDA out of memory"), False)):
        raised = error
        with pytest.raises(DrafterError if blamed else type(error), match=str(error)):
            graphs.capture_steps(
                made.runner, ROWS, (), False, context, SLOTS, lambda done, count: None, range(1, 1 + WIDEST)
            )


@pytest.fixture(scope="module", params=[False, True], ids=["", "shared top-k"])
def recorded(graphs: Any, request: pytest.FixtureRequest) -> Any:
    return made_of(graphs, True, index_share_for_mtp_iteration=request.param).runner


def test_no_graph_reads_memory_that_another_may_overwrite(recorded: Any) -> None:
    """The memory of the pool: a graph finds there what A of its own step has left, drafts find nothing; and what is
    published lies elsewhere.
    """
    recordings = POOLS[-1].recordings
    pool = set[int]().union(*(one.made for one in recordings))
    first: dict[str, Strict] = {}
    shared = 0
    for one in recordings:
        a = first.setdefault(one.block, one)
        left = a.made if "rows" in one.block and "drafts" not in one.block else set[int]()
        assert one.read & pool <= (set() if one is a else left), one.block
        shared += bool(one is not a and one.read & left)
    assert shared > 30 and {"4 rows", "drafts of 4 rows"} <= set(first)
    chains = [(*proposing.chain, *(proposing.selection or ())[:2]) for proposing in recorded.graphs.drafts.proposes]
    published = [tensor for verified in of_kind(recorded, "verify") for tensor in verified.out if tensor is not None]
    published += [tensor for chain in chains for tensor in chain]
    for step in of_kind(recorded, "tokens"):
        published += [step.out.tokens_EQ, step.out.count_E, step.out.done_E]
    assert not pool & {storage(one) for one in published}


def test_another_rule_than_was_recorded_is_not_reat_work(recorded: Any) -> None:
    verified = of_kind(recorded, "verify")[0]
    with torch.inference_mode():
        assert verified.sample(1, SamplingNeeds(random=True), recorded.sampler) is not None
        assert verified.sample(1, SamplingNeeds(random=True), RejectionSampling(recorded.sampler)) is None


def test_rows_that_do_not_fill_their_bucket_are_padding(recorded: Any) -> None:
    """Of a row with fewer drafts than another, too."""
    verified = next(one for one in of_kind(recorded, "verify") if (one.rows, one.query) == (4, 3))
    ran: list[tuple[list[int], list[int]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verified.captured_pass, "run", lambda slot, ahead: ran.append((slot, ahead)))
        rows = tuple(Row(slot, slot, 9, n, n - 1, True) for slot, n in ((5, 3), (2, 1), (6, 2)))
        _, slot_E, ints_EI, seen = verified.forward(StepPlan(0, 0, rows))
    assert ran == [([5, 5, 5, 2, 2, 2, 6, 6, 6], [0, 1, 2, 0, PADDING_OFFSET, PADDING_OFFSET, 0, 1, PADDING_OFFSET])]
    assert [one.n for one in seen.plan.rows] == [3, 3, 3] and len(slot_E) == len(ints_EI) == 3


def test_synchronization_and_host_values_in_a_capture_are_found() -> None:
    x = torch.arange(3)
    with torch.inference_mode(), pytest.raises(AssertionError), Strict():
        x.sum().item()
    with torch.inference_mode(), pytest.raises(AssertionError), Strict():
        x[x > 1]
    with torch.inference_mode(), pytest.raises(AssertionError), Strict():
        upload([1, 2], torch.int64, x.device)


def test_which_verifications_are_recorded() -> None:
    assert chain_shapes((1, 2, 4, 8), (1, 3)) == [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2)]
    assert chain_shapes((256,), (1, 2)) == [(64, 2), (64, 3)] and chain_shapes((1,), (1,)) == []
    assert (3, 3) in chain_shapes((1, 10), (2,)), "as many as the largest step has room for"
    many = chain_shapes((1, 2, 4, *range(8, 257, 8)), range(1, 9))
    assert len(many) < 100 and max(rows for rows, _ in many) == 64
