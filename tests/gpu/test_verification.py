"""Drafts verified in every kind of step (eager, piecewise, captured), beside prompts and at the end of sequences: plain
decoding's tokens, up to near ties.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.shapes import folder
from tests.gpu.test_engine import agreement, engine, tokens
from thalweg.core.sampling import SamplingParams


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise", "full"])
@pytest.mark.parametrize("drafts", [3, 6])
@pytest.mark.parametrize("shape", ["qwen2", "v3-dense"])
def test_tokens_are_those_of_plain_decoding(
    shape: str, drafts: int, mode: str, cuda: torch.device, tmp_path: Path
) -> None:
    rng, path = random.Random(drafts), folder(shape, tmp_path)
    phrase = [rng.randrange(1024) for _ in range(9)]
    prompts = [tuple(phrase * rng.randrange(2, 30) + phrase[: rng.randrange(9)]) for _ in range(14)]
    params = [SamplingParams(temperature=0.0, max_tokens=rng.randrange(3, 60), ignore_eos=True) for _ in prompts]
    wishes: dict[str, Any] = {"max_running_requests": 9, "chunked_prefill_size": 128, "cuda_graph_mode": mode}
    plain = tokens(engine(path, **wishes), prompts, params)
    speculation = {"speculative_algorithm": "NGRAM", "speculative_num_steps": drafts, "speculative_adaptive": False}
    made = engine(path, **wishes, **speculation)
    got = tokens(made, prompts, params)
    assert [len(one) for one in got] == [len(one) for one in plain]
    assert agreement(plain, got, 8) >= 0.7
    stats = made.loop.stats()
    assert stats.drafted_tokens >= 30 and not stats.drafter_failures
