"""Sparse attention on a GPU beyond index_topk tokens: the reference equals the CPU, and plain PyTorch beside kernels
equals the reference.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compose import deterministic, matrix
from tests.configs import config
from tests.gpu.shapes import COMMON, LATENT, SHAPES, Part, batches, planes, twins
from tests.gpu.test_engine import agreement, engine, tokens
from thalweg.attention.selection import select_top_k
from thalweg.config.model import facts_of
from thalweg.core.kernels import KernelConfig
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.layers.mla import Indexer
from thalweg.models.token_by_token import TokenByToken

TOPK, PROMPT, NEW = 2048, 3900, 12
SHAPE: dict[str, Any] = COMMON | LATENT | {
    "architectures": ["DeepseekV32ForCausalLM"], "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "num_attention_heads": 8, "q_lora_rank": 256,
    "num_hidden_layers": 3, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 2,
    "topk_group": 1, "routed_scaling_factor": 2.5, "index_topk": TOPK, "index_head_dim": 128, "index_n_heads": 8,
}  # fmt: skip
FP8 = SHAPE | {"quantization_config": SHAPES["v3"]["quantization_config"]}
KINDS = {name: KernelConfig(decode=name, prefill=name) for name in ("torch", "triton_sparse")}
STEPS: dict[str, list[Part]] = {
    "two prompts": [(1, 0, 700), (20, 0, 130)],
    "decode": [(1, 700, 1), (20, 130, 1)],
    "chunks": [(1, 701, 90), (20, 131, 300)],
    "decode beside a prompt": [(1, 791, 1), (20, 431, 1), (32, 0, 70)],
}


def answer(path: Path, device: str, budget: int, **more: Any) -> list[tuple[float, ...]]:
    """Log-probabilities: of prompt positions past index_topk, then of the tokens that follow; all forced to the CPU's
    own choice by greed.
    """
    settings = config(
        model_path=str(path),
        device=device,
        context_length=4096,
        num_pages=70,
        max_running_requests=2,
        chunked_prefill_size=budget,
        warmup=False,
        **more,
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
    on_cpu = answer(checkpoint, "cpu", 1024, load_format="dummy", threads=8, show_progress=False)
    on_gpu = answer(checkpoint, "cuda", 1024, load_format="dummy", show_progress=False)
    chunked = answer(checkpoint, "cuda", 700, load_format="dummy", show_progress=False)
    assert len(on_cpu) == PROMPT - 1 + NEW
    for got in (on_gpu, chunked):
        apart = [abs(a[-1] - b[-1]) for a, b in zip(on_cpu, got, strict=True)]
        assert sum(gap < 1e-3 for gap in apart) > 0.99 * len(apart), (
            "a choice at a near tie moves a few; the rest is rounding"
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [SHAPE, FP8], ids=["bf16", "fp8"])
def test_beside_kernels_it_is_the_references(shape: dict[str, Any], kind: str, cuda: torch.device) -> None:
    """The bounds of test_models.py, for the median token. What the indexer chooses is compared apart from what becomes
    of a choice: a near tie that rounding decides moves a tenth of what attention to 256 tokens of random weights
    gives.
    """

    def scattered(scores_NS: torch.Tensor, topk: int) -> torch.Tensor:
        """A choice of any candidates, the same for the same context."""
        order = torch.arange(scores_NS.shape[1], device=cuda) * 7919 % 4093
        return select_top_k(torch.where(scores_NS == -torch.inf, -torch.inf, order.float()), topk)

    of, bound = facts_of(shape | {"index_topk": 256}, "sparse"), 0.15 if shape is FP8 else 0.02
    reference, kernels = twins(of, cuda, KINDS[kind])
    for module in (*reference.modules(), *kernels.modules()):
        if isinstance(module, Indexer):
            module.selection = scattered
    there, here, generator = planes(reference, cuda), planes(kernels, cuda), torch.Generator().manual_seed(1)
    for name, rows in STEPS.items():
        plain, paged = batches(rows, cuda, generator, 1024)
        with torch.inference_mode():
            exact = reference.logits(reference.forward(plain, there)).double()
            got = kernels.logits(kernels.forward(paged, here)).double()
        error = float(((got - exact).norm(dim=1) / exact.norm(dim=1)).median())
        assert error < bound, f"{name}: {error:.4f}"
    for plane in ("index", "latent"):  # of the first layer, which no expert has touched
        kept, exact = here.paged(plane, 0).double(), there.paged(plane, 0).double()
        assert float((kept - exact).norm() / exact.norm()) < (0.05 if shape is FP8 else 0.01), plane


@pytest.mark.parametrize("shape", [SHAPE, FP8], ids=["bf16", "fp8"])
def test_chunks_and_prefix_hits_change_few_tokens(shape: dict[str, Any], cuda: torch.device, tmp_path: Path) -> None:
    """Past index_topk tokens. Rounding differs between steps of other sizes, and decides near ties of choice, experts
    and tokens.
    """
    (tmp_path / "config.json").write_text(json.dumps(shape))
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(1024) for _ in range(3000)) for _ in range(8)]
    params = [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)] * 8
    of = engine(tmp_path, chunked_prefill_size=4096)
    assert of.config.kernels.decode == "torch"
    whole, cached = tokens(of, prompts, params), tokens(of, prompts, params)
    chunked = tokens(engine(tmp_path, chunked_prefill_size=512), prompts, params)
    assert agreement(whole, cached, 2) >= 0.6 and agreement(whole, chunked, 2) >= 0.6


def test_bits_depend_on_the_sequence_alone(cuda: torch.device) -> None:
    def engine(**fields: Any) -> LocalEngine:
        choice = KernelConfig(decode="torch", prefill="torch", deterministic=True)
        return LocalEngine(matrix.settings(cuda.type, dtype="bfloat16", kernels=choice, **fields))

    plain = deterministic.answers(engine(**deterministic.PLAIN), "seeded", alone=True)
    got = deterministic.answers(engine(**deterministic.CASES["overlap, prefix hits"]), "seeded", alone=False)
    deterministic.assert_equal_bits(plain, got)


@pytest.mark.parametrize("shape", [SHAPE, FP8], ids=["bf16", "fp8"])
def test_a_deterministic_one_starts_warm(shape: dict[str, Any], cuda: torch.device, tmp_path: Path) -> None:
    """Every token is a step of its own: what runs before the first request, and what is measured, is one token's."""
    (tmp_path / "config.json").write_text(json.dumps(shape))
    of = engine(tmp_path, warmup=True, deterministic_inference=True, max_running_requests=4)
    assert of.config.warmup and of.config.step_times is None and isinstance(of.runner.model, TokenByToken)
    prompts = [tuple(range(100)), tuple(range(7, 50))]
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)] * 2
    together = tokens(of, prompts, params)
    assert together == [tokens(of, [prompt], params[:1])[0] for prompt in prompts]
