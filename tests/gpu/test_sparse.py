"""Sparse attention on a GPU, by the reference: well past index_topk tokens it gives what the CPU gives, which transformers proves there."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.shapes import COMMON, LATENT
from thalweg.config.model import facts_of
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.engine.settings import EngineSettings
from thalweg.layers.parts import ReferenceParts
from thalweg.models import catalog
from thalweg.weights.stream import fill_dummy

TOPK, PROMPT, NEW = 2048, 3900, 12
SHAPE: dict[str, Any] = COMMON | LATENT | {
    "architectures": ["DeepseekV32ForCausalLM"], "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "num_attention_heads": 8, "q_lora_rank": 256,
    "num_hidden_layers": 3, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 2,
    "topk_group": 1, "routed_scaling_factor": 2.5, "index_topk": TOPK, "index_head_dim": 128, "index_n_heads": 8,
}  # fmt: skip


def answer(path: Path, device: str, budget: int, **more: Any) -> list[tuple[float, ...]]:
    """Log-probabilities: of prompt positions past index_topk, then of the tokens that follow; all forced to the CPU's own choice by greed."""
    settings = EngineSettings(
        path=str(path), device=device, context=4096, pages=70, slots=2, budget=budget, warm=False, **more
    )
    engine = LocalEngine(settings)
    rng = random.Random(5)
    prompt = tuple(rng.randrange(engine.vocab) for _ in range(PROMPT))
    engine.submit(
        prompt, SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=4, prompt_logprobs=0, ignore_eos=True)
    )
    found: list[tuple[float, ...]] = []
    while not engine.idle:
        for delta in engine.step():
            found += [(one[0],) for one in delta.prompt_logprobs]
            found += [(float(token), one[0]) for token, one in zip(delta.tokens, delta.logprobs, strict=True)]
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("sparse")
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


def test_past_the_chosen_context_it_is_the_cpus(checkpoint: Path, cuda: torch.device, monkeypatch: Any) -> None:
    same_weights(monkeypatch)
    on_cpu = answer(checkpoint, "cpu", 1024, load_format="dummy", threads=8, progress=False)
    on_gpu = answer(checkpoint, "cuda", 1024, load_format="dummy", progress=False)
    chunked = answer(checkpoint, "cuda", 700, load_format="dummy", progress=False)
    assert len(on_cpu) == PROMPT - 1 + NEW
    for got in (on_gpu, chunked):
        apart = [abs(a[-1] - b[-1]) for a, b in zip(on_cpu, got, strict=True)]
        assert sum(gap < 1e-3 for gap in apart) > 0.99 * len(apart), (
            "a choice at a near tie moves a few; the rest is rounding"
        )


def same_weights(monkeypatch: Any) -> None:
    """Both devices draw their random weights on the CPU."""
    from thalweg.engine import build

    def fill(model: torch.nn.Module, seed: int) -> None:
        twin = catalog.assemble(facts_of(SHAPE, "sparse"), ReferenceParts(torch.float32, torch.device("cpu")))
        assert isinstance(twin, torch.nn.Module)
        fill_dummy(twin, seed)
        with torch.no_grad():
            for there, here in zip(model.parameters(), twin.parameters(), strict=True):
                there.copy_(here)

    monkeypatch.setattr(build, "fill_dummy", fill)
