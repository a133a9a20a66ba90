"""Trees that were recorded: steps that verify them, and growing them, give plain decoding's tokens. CUDA graphs are played by a recorder of torch's
operations; who asks the device, or takes numbers of the host along, fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.cpu.test_recorded_drafts import Tape, add_all_
from tests.cpu.test_speculation import engine, prompts, run, unrecorded
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import TreeShape
from thalweg.moe.experts import Experts
from thalweg.runner import tree_graphs

assert unrecorded  # a fixture of this module, too
SLOTS, SHAPE = 7, TreeShape(3, 3, 7)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def played() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_graphs, "borrow", lambda x: x)
        patch.setattr(tree_graphs, "refill", lambda out, values: out.copy_(torch.tensor(values)))
        patch.setattr(Experts, "add_", add_all_)
        yield


def test_recorded_trees_give_plain_decodings_tokens() -> None:
    plain = engine(0)
    made = engine(SHAPE.nodes, tree=SHAPE, slots=SLOTS + 1, depth=2)
    made.loop.scheduler.holdings.slots.remove(SLOTS)  # nobody's: what fills recordings up
    runner, counts = made.runner, {"verified": 0, "grown": 0}
    held = runner.model, runner.planes, runner.slots, runner.drafting.drafter
    with torch.inference_mode():
        runner.groves = groves = tree_graphs.groves([1, 16], *held, runner.slots.context, SLOTS, Tape())  # type: ignore[arg-type]
    assert [one.rows for one in groves.groves] == [1, tree_graphs.TREES]

    def counting(owner: Any, name: str, count: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any) -> Any:
            found = real(*args)
            counts[count] += found is not None
            return found

        setattr(owner, name, watched)

    counting(groves, "get", "verified")
    counting(groves.drafts, "propose", "grown")
    for params in (GREEDY, SEEDED):
        assert run(made, prompts(3, 60), params) == run(plain, prompts(3, 60), params)
    stats = made.loop.stats()
    assert stats.accepted_tokens > 20 and not stats.drafter_failures
    assert min(counts.values()) > 8, counts
