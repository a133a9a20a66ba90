"""Captured decode steps on the CPU (`models/traced.py`) equal eager steps for every family, context length and row
count.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu import zoo
from tests.cpu.batches import Bench
from tests.cpu.in_memory import InMemory
from thalweg.attention.selection import RandomSelection
from thalweg.kernels.experts.ref import SCRIPTABLE
from thalweg.models.traced import ROWS, TracedModel
from thalweg.weights.loader import load

pytestmark = pytest.mark.skipif(not SCRIPTABLE, reason="TorchScript does not support this Python")


@pytest.fixture(autouse=True, scope="module")
def one_traced_row() -> None:
    """Here steps of all rows are traced."""


@pytest.fixture(scope="module", params=["v2-lite", "v3", "v32", "glm-5", "llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    config = zoo.draw_config(request.param, 2)
    zoo.save(zoo.reference(config, 2), config, path)
    return path


def test_every_step_is_bit_for_bit_the_eager_one(folder: Path) -> None:
    """One row from before index_topk across page borders, then rows of different lengths, joined and left."""
    model = zoo.ours(folder)
    plain, recorded = Bench(model, 3), Bench(model, 3, trace=True)
    assert isinstance(recorded.model, TracedModel)
    steps = [[(0, [3, 4])], *([(0, [5 + i % 60])] for i in range(80))]
    steps += [[(1, list(range(70)))], *([(0, [7 + i]), (1, [9 + i])] for i in range(68))]
    steps += [[(2, [4]), (0, [5]), (1, [6])] for _ in range(11)]
    steps += [[(1, [8])] for _ in range(5)]
    for rows in steps:
        for want, got in zip(plain.step(rows), recorded.step(rows), strict=True):
            assert torch.equal(want, got)
    kinds = 1 if model.facts.indexer is None else 2
    assert len(recorded.model._programs) == ROWS * kinds


def test_nothing_is_left_of_a_model_that_is_dropped(folder: Path) -> None:
    """A process makes engines over and over."""
    model = zoo.ours(folder)
    bench = Bench(model, 1, trace=True)
    for i in range(2):
        bench.step([(0, [i])])
    tensors = {
        name: weakref.ref(one)
        for name, module in model.named_modules()
        for one in (*module.parameters(recurse=False), *vars(module).values())
        if isinstance(one, torch.Tensor)
    }
    del model, bench
    gc.collect()
    assert not {name for name, one in tensors.items() if one() is not None}


def test_padding_rows_pass_through(folder: Path) -> None:
    model = zoo.ours(folder)
    plain, recorded = Bench(model, 1), Bench(model, 1, trace=True)
    for i in range(20):
        assert torch.equal(plain.step([(0, [i])], padding=1)[0], recorded.step([(0, [i])], padding=1)[0])


def test_weights_may_change_in_place(folder: Path) -> None:
    model = zoo.ours(folder)
    traced, plain, ids = Bench(model, 2, trace=True), Bench(model, 1), list(range(12))
    before = torch.cat([traced.step([(0, [i])])[0] for i in ids])
    update = {"model.norm.weight": torch.rand(model.facts.hidden) + 0.5}
    load(model, model.table(), InMemory(update), is_partial=True)  # type: ignore[arg-type]
    after = torch.cat([traced.step([(1, [i])])[0] for i in ids])
    assert torch.equal(after, torch.cat([plain.step([(0, [i])])[0] for i in ids]))
    assert not torch.equal(after, before)


class Calls:
    """Counts the eager forwards of a model."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, forward = 0, model.forward

        def counted(*args: Any) -> Any:
            self.count += 1
            return forward(*args)

        monkeypatch.setattr(model, "forward", counted)


def test_larger_batches_prompts_and_other_planes_run_eagerly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.ours(folder)
    traced, other = Bench(model, ROWS + 1, trace=True), Bench(model, 1)
    other.model, calls = traced.model, Calls(model, monkeypatch)
    traced.step([(row, [1]) for row in range(ROWS)])
    assert calls.count == 0
    traced.step([(row, [1]) for row in range(ROWS + 1)])
    traced.step([(0, [1, 2, 3])])
    other.step([(0, [1])])
    assert calls.count == 3


def test_another_choice_of_context_is_not_recorded(folder: Path) -> None:
    model = zoo.ours(folder, selection=RandomSelection(1))
    assert isinstance(Bench(model, 1, trace=True).model, TracedModel) == (model.facts.mla is None)


def test_a_verification_runs_as_rows_of_one_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of it is sampled; a prompt of as many tokens is left as it is."""
    model = zoo.ours(folder)
    plain, recorded = Bench(model, 1), Bench(model, 1, trace=True)
    for rows in [[(0, list(range(60)))], *([(0, [7, 8, 9])] for _ in range(6))]:
        batches = [bench.batch(rows) for bench in (plain, recorded)]
        if len(rows[0][1]) == 3:
            batches = [replace(batch, logits_indices_N=torch.arange(3)) for batch in batches]
        with torch.inference_mode():
            want, got = model.forward(batches[0], plain.planes), recorded.model.forward(batches[1], recorded.planes)
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)
        for bench in (plain, recorded):
            bench.lengths[0] += len(rows[0][1])
    calls = Calls(model, monkeypatch)
    verification = replace(recorded.batch([(0, [7, 8, 9])]), logits_indices_N=torch.arange(3))
    with torch.inference_mode():
        recorded.model.forward(verification, recorded.planes)
    assert calls.count == 0
    recorded.step([(0, [1, 2])])
    assert calls.count == 1
