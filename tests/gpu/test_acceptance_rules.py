"""Acceptance rules on a GPU: the same drafts, decisions and tokens as on the CPU, and a whole engine with each rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.test_draft_graphs import answers, engine
from tests.gpu.test_engine import agreement
from thalweg.batch.slots import Slots
from thalweg.core.plan import Bind, SamplingNeeds
from thalweg.core.sampling import SamplingParams
from thalweg.sampling.catalog import sampler_on, with_acceptance_rule
from thalweg.sampling.draft_sampling import PROBABILITIES, IndependentDraftSampling

VOCAB, ROWS, DRAFTS = 129280, 32, 3
KINDS = ({"temperature": 0.8}, {"temperature": 0.0}, {"top_p": 0.9, "min_p": 0.01}, {"temperature": 0.6, "top_k": 40})
NEEDS = SamplingNeeds(random=True, truncated=True)
NEAR = 2  # tokens of a step that rounding may move, where candidates are almost as good


def step(device: str, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts [R, K], the first of them kept distributions, and tokens [R, K + 1], of the same logits everywhere."""
    generator = torch.Generator().manual_seed(5)
    target = 3 * torch.randn(ROWS, DRAFTS + 1, VOCAB, generator=generator)
    guessed = target[:, :DRAFTS] + torch.randn(ROWS, DRAFTS, VOCAB, generator=generator)
    target, guessed = target.to(device), guessed.to(device)
    where = torch.device(device)
    slots = Slots(ROWS, 64, where, IndependentDraftSampling(DRAFTS, VOCAB).fields())
    slots.bind([Bind(i, (1, 2), 1, 1, 60, i, (), SamplingParams(**KINDS[i % 4])) for i in range(ROWS)])  # type: ignore[arg-type]
    slot_R, made = torch.arange(ROWS, device=where), []
    for ahead in range(DRAFTS):
        draft_sampling = IndependentDraftSampling(DRAFTS, VOCAB, sampler_on(where).distribution)
        there = slots.ints_SI.clone()
        there[:, 0] += ahead
        made.append(draft_sampling.sample_drafts(guessed[:, ahead].clone(), slots, slot_R, there, ahead, True))
        slots.tokens_SL[:, 2 + ahead] = made[-1].int()
    slots.num_drafts.fill_(DRAFTS)
    slot_N = slot_R.repeat_interleave(DRAFTS + 1)
    ints_NI = slots.ints_SI[slot_N]
    ints_NI[:, 0] += torch.arange(DRAFTS + 1, device=where).repeat(ROWS)
    sampling = with_acceptance_rule(sampler_on(where), rule, 10, 0.2)
    tokens_N = sampling.sample_tokens(target.flatten(0, 1), slots, slot_N, ints_NI, NEEDS)
    kept = slots.extra[PROBABILITIES].sum(-1).cpu()
    return torch.stack(made, 1).cpu(), kept, tokens_N.view(ROWS, -1).cpu()


@pytest.mark.parametrize("rule", ["gumbel-max", "rejection-sampling", "relaxed"])
def test_a_gpu_step_equals_the_cpus(rule: str) -> None:
    drafts, kept, tokens = step("cuda", rule)
    expected_drafts, expected_kept, expected = step("cpu", rule)
    assert (drafts != expected_drafts).sum() <= NEAR and (tokens != expected).sum() <= NEAR
    torch.testing.assert_close(kept, expected_kept, atol=1e-4, rtol=0)
    right = (tokens[:, :DRAFTS] == drafts).float().mean()
    assert 0.1 < right < 1, "some drafts are right, and some are not"


@pytest.mark.parametrize("rule", ["rejection-sampling", "relaxed"])
def test_an_engine_judges_with_graphs_as_without(rule: str, tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}, {"top_p": 0.9, "seed": 4}]
    got = []
    for name, fields in (("none", {"cuda_graph_bs": ()}), ("whole", {})):
        made = engine("NEXTN", tmp_path / name, (), speculative_acceptance=rule, **fields)
        got.append(answers(made, kinds))
        assert not made.loop.stats().drafter_failures
        if name != "none":
            graphs: Any = made.runner.graphs
            recorded = [graph for graph in graphs.graphs if graph.key[0] == "verify"]
            assert recorded and all(one.captured_pass.context.sampler is made.runner.sampler for one in recorded)
    assert agreement(*got, 10) >= 0.7
