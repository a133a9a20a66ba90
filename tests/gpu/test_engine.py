"""The engine on a GPU: captured decode steps, overlap, mixed steps and sampling give what plain steps give."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.shapes import SHAPES, folder
from thalweg.config.tree import options_of
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve
from thalweg.llm import LLM

TINY = Path(__file__).parents[2] / "models" / "tiny"


def engine(path: Path, **wishes: Any) -> LocalEngine:
    given = {"max_running_requests": 16, "context_length": 4096, "max_total_tokens": 32768, "random_seed": 1}
    given |= {"warmup": False} | wishes  # what is compiled ahead is tested in test_start.py
    return LocalEngine(
        resolve(options_of(model=str(path), load_format="dummy", **given), weights=False, progress=False).engine
    )


def tokens(of: LocalEngine, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> list[list[int]]:
    uids = [of.submit(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
    got: dict[int, list[int]] = {uid: [] for uid in uids}
    while not of.idle:
        for delta in of.step():
            got[delta.uid] += delta.tokens
    return [got[uid] for uid in uids]


def agreement(left: list[list[int]], right: list[list[int]], first: int) -> float:
    """Share of the sequences whose first tokens are equal. Random weights have many near-ties, and a row's rounding
    depends on how many rows share its step: a few of a hundred tokens part (more in FP8), so sequences that were
    batched otherwise are compared in few.
    """
    return sum(a[:first] == b[:first] for a, b in zip(left, right, strict=True)) / len(left)


@pytest.mark.parametrize("shape", SHAPES)
def test_recorded_steps_overlap_and_chunks_change_no_token(shape: str, cuda: torch.device, tmp_path: Path) -> None:
    rng, path = random.Random(1), folder(shape, tmp_path)
    prompts = [tuple(rng.randrange(1024) for _ in range(rng.randrange(1, 700))) for _ in range(40)]
    greedy = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True) for _ in prompts]
    plain = tokens(engine(path, cuda_graph_mode="none", overlap_schedule=False), prompts, greedy)
    kinds: list[tuple[dict[str, Any], int, float]] = [
        ({"overlap_schedule": False}, 24, 0.8),  # the same batches, so almost the same numbers
        ({}, 2, 0.7),
        ({"cuda_graph_mode": "none", "chunked_prefill_size": 96}, 2, 0.7),
    ]
    for wishes, first, least in kinds:
        got = tokens(engine(path, **wishes), prompts, greedy)
        assert all(len(one) == 24 for one in got)
        assert agreement(plain, got, first) >= least, (wishes, agreement(plain, got, first))


def test_every_kind_of_sampling_runs_recorded_or_not(cuda: torch.device, tmp_path: Path) -> None:
    rng, path = random.Random(2), folder("qwen3", tmp_path)
    prompts = [tuple(rng.randrange(1024) for _ in range(rng.randrange(1, 90))) for _ in range(12)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 4},
        {"temperature": 0.7, "min_p": 0.1, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"temperature": 0.0, "logit_bias": ((7, 5.0),), "min_tokens": 4},
    ]
    for kind in kinds:
        params = [SamplingParams(max_tokens=12, ignore_eos=True, **kind) for _ in prompts]
        plain = tokens(engine(path, cuda_graph_mode="none", overlap_schedule=False), prompts, params)
        recorded = tokens(engine(path, overlap_schedule=False), prompts, params)
        assert agreement(plain, recorded, 12) >= 0.8, (kind, agreement(plain, recorded, 12))
        assert all(len(one) == 12 for one in recorded)


def test_the_bundled_model_counts_on_a_gpu_as_on_a_cpu(cuda: torch.device) -> None:
    sums = [f"{a}+{b}=" for a, b in ((12, 7), (40, 2), (31, 55), (8, 9))]
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    there = LLM(str(TINY), device="cpu", dtype="float32").generate(sums, greedy)
    here = LLM(str(TINY), device="cuda", dtype="float32", max_total_tokens=8192).generate(sums, greedy)
    assert [one.outputs[0].text for one in here] == [one.outputs[0].text for one in there]
