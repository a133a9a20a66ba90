"""Two ranks that run the plans of a one-rank engine give its tokens, drafts and log-probabilities: real runners, loaders
and drafters, over axes whose ranks are threads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cpu import reference_model
from tests.cpu.batches import run_step
from tests.cpu.ranks import PATIENCE, layouts, on_ranks
from tests.cpu.test_sharded_models import BUGS, SHAPES, written
from thalweg.batch.slots import Slots
from thalweg.config.engine import EngineConfig
from thalweg.config.tree import options_of
from thalweg.core.agreement import RankStep, coordinate_step
from thalweg.core.plan import Output, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.engine.build import load_drafter, load_weights
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import Planes
from thalweg.models import catalog, traced
from thalweg.models.catalog import published_dtype, read_facts
from thalweg.parallel.layout import Layout
from thalweg.runner.runner import Runner
from thalweg.sampling.catalog import draft_sampling_for
from thalweg.spec.catalog import build_drafter
from thalweg.spec.eagle import eagle_head
from thalweg.weights.random import random_tensors

PROMPTS = [[(31 * i + 7 * n) % 900 + 3 for i in range(length)] for n, length in enumerate((5, 90, 33, 150))]
CHAIN: dict[str, Any] = {"speculative_num_steps": 3}
TREE: dict[str, Any] = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
NEXTN, EAGLE3 = {"speculative_algorithm": "NEXTN"}, {"speculative_algorithm": "EAGLE3"}


@dataclass
class Step:
    """A step of the one-rank engine."""

    plan: StepPlan
    num_drafts: int = 0
    outputs: tuple[Output, ...] = ()


@dataclass
class Exchange:
    """Hands the record of each rank to all."""

    size: int
    barrier: threading.Barrier = field(init=False)
    rank_steps: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier, self.rank_steps = threading.Barrier(self.size, timeout=PATIENCE), [None] * self.size

    def __call__(self, rank: int, rank_step: RankStep) -> list[RankStep]:
        self.rank_steps[rank] = rank_step
        self.barrier.wait()
        rank_steps = list(self.rank_steps)
        self.barrier.wait()
        return rank_steps


def config_of(folder: Path, **wishes: Any) -> EngineConfig:
    wishes = {
        "max_running_requests": 3,
        "max_total_tokens": 4096,
        "chunked_prefill_size": 64,
        "random_seed": 1,
    } | wishes
    options = options_of(
        model=str(folder), device="cpu", dtype="float32", threads=1, speculative_adaptive=False, **wishes
    )
    return resolve(options, weights=False, progress=False).engine


def steps_of_one_rank(config: EngineConfig, prompts: list[list[int]]) -> list[Step]:
    """Serves the prompts, the second half of them some steps later, and returns every step."""
    engine, steps = LocalEngine(config), list[Step]()
    runner: Any = engine.runner
    forward, draft, add_drafts = runner.forward, runner.draft, runner.add_drafts

    def recorded_forward(plan: StepPlan, agreed: Any = None) -> Any:
        steps.append(Step(plan))
        return forward(plan, agreed)

    def recorded_draft(forwarded: Any, sampled: Any, num_drafts: int = 0) -> Any:
        steps[-1].num_drafts = num_drafts
        return draft(forwarded, sampled, num_drafts)

    def recorded_outputs(plan: StepPlan, outputs: Any, drafted: Any) -> Any:
        steps[-1].outputs = tuple(add_drafts(plan, outputs, drafted))
        return steps[-1].outputs

    runner.forward, runner.draft, runner.add_drafts = recorded_forward, recorded_draft, recorded_outputs
    for number, prompt in enumerate(prompts):
        if number == len(prompts) // 2:
            for _ in range(4):
                engine.step()
        scored = {"prompt_logprobs": 2} if number % 2 else {}
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, **scored))
    while not engine.idle:
        engine.step()
    return steps


def runner_of(config: EngineConfig, layout: Layout) -> Runner:
    """The runner of one rank, with the weights of its part."""
    facts, device = read_facts(Path(config.model_path)), torch.device("cpu")
    layers = ReferenceLayers(
        torch.float32, device, kernels=config.kernels, layout=layout, published=published_dtype(facts)
    )
    model = catalog.assemble(facts, layers)
    sampling = draft_sampling_for(config.speculative_acceptance, config.num_drafts, facts.vocab, device)
    name, folder = config.speculative_algorithm, config.speculative_draft_model_path
    drafter = build_drafter(name, model, folder, sampling, config.tree)
    load_weights(model, drafter.modules(), config)
    load_drafter(drafter.own_weight_modules(), config)
    requests = config.max_running_requests + 1
    planes = Planes((*model.planes(), *drafter.planes()), config.num_pages + 1, device, requests, config.context_length)
    slots = Slots(requests, config.context_length, device, drafter.fields(), config.tree)
    return Runner(model, model, planes, slots, drafter)


def run_steps(runner: Runner, steps: list[Step]) -> list[tuple[Output, ...]]:
    """On one of the ranks that compute the same rows."""
    return [run_step(runner, step.plan, None, step.num_drafts) for step in steps]


def differences(got: list[tuple[Output, ...]], steps: list[Step]) -> list[str]:
    """What differs beyond rounding: sums are grouped otherwise, which may turn near ties among drafts, and log-
    probabilities by little.
    """
    wrong, drafts = list[str](), list[bool]()
    for number, (outputs, step) in enumerate(zip(got, steps, strict=True)):
        for ours, want in zip(outputs, step.outputs, strict=True):
            if (ours.tokens, ours.done, ours.is_nan) != (want.tokens, want.done, want.is_nan):
                wrong.append(f"step {number}: {ours.tokens} is not {want.tokens}")
            drafts += [(ours.drafts, ours.parents) != (want.drafts, want.parents)] * bool(want.drafts)
            pairs = zip(ours.prompt_logprobs, want.prompt_logprobs, strict=True)
            if any(abs(a.logprob - b.logprob) > 1e-2 or a.top_ids[0] != b.top_ids[0] for a, b in pairs):
                wrong.append(f"step {number}: prompt log-probabilities differ")
    if sum(drafts) > 0.05 * len(drafts):
        wrong.append(f"{sum(drafts)} of {len(drafts)} drafts differ")
    return wrong


def eagle_folder(target: Path, path: Path) -> Path:
    """An EAGLE-3 head of random weights."""
    path.mkdir()
    head = SHAPES["qwen2.5"] | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "draft_vocab_size": 333}
    (path / "config.json").write_text(json.dumps(head))
    made = eagle_head(reference_model.build(read_facts(target), torch.float32), path)
    tensors = {
        tensor.spec.name: tensor.slice((), 5, torch.device("cpu")) for tensor in random_tensors(made.table(), {}, False)
    }
    save_file(tensors | {"d2t": torch.arange(333) * 2}, path / "model.safetensors")
    return path


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("v2-lite", {}),
    "v3-nextn": ("v3", NEXTN | CHAIN),
    "v3-fp8-nextn-tree": ("v3-fp8", NEXTN | TREE),
    "v3.2-nextn": ("v3.2", NEXTN | CHAIN),
    "v3.2-nextn-hisparse": ("v3.2", NEXTN | CHAIN | {"enable_hisparse": True}),
    "qwen-eagle3": ("qwen2.5", EAGLE3 | CHAIN),
    "qwen-eagle3-tree": ("qwen2.5", EAGLE3 | TREE),
}


def case(name: str, path: Path) -> EngineConfig:
    shape, wishes = CASES[name]
    folder = written(path, SHAPES[shape])
    if wishes.get("speculative_algorithm") == "EAGLE3":
        wishes = wishes | {"speculative_draft_model_path": str(eagle_folder(folder, path / "head"))}
    return config_of(folder, **wishes)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of an engine's start on a CPU is tracing its steps."""
    monkeypatch.setattr(traced, "ROWS", 0)


@pytest.mark.parametrize("name", CASES)
def test_two_tensor_parallel_ranks_give_one_ranks_outputs(name: str, tmp_path: Path) -> None:
    config, ranks = case(name, tmp_path), layouts(tp=2, ep=2)
    steps = steps_of_one_rank(config, PROMPTS)
    drafted = sum(len(output.drafts) for step in steps for output in step.outputs)
    assert len(steps) > 12 and (drafted > 50) == bool(config.num_drafts)
    for got in on_ranks(2, lambda rank: run_steps(runner_of(config, ranks[rank]), steps)):
        assert not differences(got, steps)


@pytest.mark.parametrize("name", ["v2-lite", "v3-nextn", "v3-fp8-nextn-tree", "v3.2-nextn-hisparse"])
def test_an_idle_data_parallel_rank_changes_no_output(name: str, tmp_path: Path) -> None:
    """Rank 1 has no requests: it runs the agreed passes on padding, experts and drafts with them."""
    config, ranks, exchange = case(name, tmp_path), layouts(dp=2, ep=2), Exchange(2)
    steps = steps_of_one_rank(config, PROMPTS)

    def work(rank: int) -> list[tuple[Output, ...]]:
        runner, got = runner_of(config, ranks[rank]), list[tuple[Output, ...]]()
        for step in steps:
            plan = step.plan if rank == 0 else StepPlan(step.plan.step, step.plan.published_step)
            agreed = coordinate_step(exchange(rank, runner.rank_step(plan)))
            got.append(run_step(runner, plan, agreed, agreed.num_drafts))
        return got

    got = on_ranks(2, work)
    assert not differences(got[0], steps)
    assert all(outputs == () for outputs in got[1])


CAUGHT_BY = {
    "residual added twice": "qwen-eagle3",
    "bias added twice": "biased",
    "watched stream unsettled": "qwen-eagle3",
    "shared expert added twice": "v2-lite",
    "packed gate and up cut across their middle": "v2-lite",
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_change_outputs(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "biased", ("one-key-head", {}))
    config, ranks = case(CAUGHT_BY[bug], tmp_path), layouts(tp=2)
    steps = steps_of_one_rank(config, PROMPTS)
    plant: Callable[[pytest.MonkeyPatch], None] = BUGS[bug][0]
    for is_planted in (False, True):
        if is_planted:
            plant(monkeypatch)
        for got in on_ranks(2, lambda rank: run_steps(runner_of(config, ranks[rank]), steps)):
            assert bool(differences(got, steps)) == is_planted
