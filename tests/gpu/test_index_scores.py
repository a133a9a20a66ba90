"""Index scores by DeepGEMM: beside plain torch, under graphs, behind kernels that overlap, and under models.

python -m pytest tests/gpu/test_index_scores.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.queued import assert_same_without_waiting
from tests.gpu.shapes import SPARSE
from tests.gpu.test_engine import agreement, engine, tokens
from tests.gpu.test_sparse import FP8, assert_beside_the_reference
from thalweg.config.backends import installed_libraries
from thalweg.core.kernels import RECORD, CheckCase, KernelConfig
from thalweg.core.sampling import SamplingParams
from thalweg.kernels.attend.args import KvWrite, QueryRows
from thalweg.kernels.case import normal
from thalweg.kernels.dsa import deep_gemm
from thalweg.kernels.dsa import triton as dsa
from thalweg.memory.planes import Planes, index_plane

pytestmark = pytest.mark.skipif("deep_gemm" not in installed_libraries(), reason="deep_gemm is not installed")
DIM, CONTEXTS = 128, (1, 63, 64, 65, 4_000, 70_000)
NAMED = {"dsa_paged_mqa_logits_backend": "deep_gemm", "kv_cache_dtype": "fp8_e4m3"}


class Filled:
    """Keys of contexts in shuffled pages, and queries with the weights of their heads."""

    def __init__(
        self, contexts: tuple[int, ...], query: int, heads: int, device: torch.device, padding: int = 0
    ) -> None:
        """padding: rows behind the others, of one token each on the null page."""
        generator = torch.Generator().manual_seed(heads + query)
        counts = [-(-context // 64) for context in contexts]
        rows, count = len(contexts) + padding, (len(contexts) + padding) * query
        self.planes = Planes((index_plane(0, DIM),), 1 + sum(counts), device)
        places = torch.arange(64, 64 * (1 + sum(counts)), device=device)
        self.planes.write("index", 0, places, normal(generator, len(places), DIM, dtype=torch.bfloat16).to(device))
        table = torch.zeros(rows, max(counts), dtype=torch.int32)
        for row, pages in enumerate((1 + torch.randperm(sum(counts), generator=generator)).split(counts)):
            table[row, : len(pages)] = pages
        ends = torch.tensor([*contexts, *[query] * padding])
        positions = (ends.unsqueeze(1) - query + torch.arange(query)).flatten().clamp(min=0)
        rows_T = torch.arange(rows).repeat_interleave(query).int()
        self.rows = QueryRows(rows_T.to(device), table.to(device), positions.to(device))
        self.query = normal(generator, count, heads * DIM).to(torch.float8_e4m3fn).to(device)
        self.weights, self.longest = normal(generator, count, heads).to(device), max(contexts)
        self.keys = self.planes.paged("index", 0)

    def expected(self, token: int) -> tuple[Tensor, Tensor]:
        """By the definition, of all that the token sees; and the sums of what is added up, each without its sign."""
        position = int(self.rows.positions_T[token])
        pages = self.rows.table_RL[self.rows.rows_T[token], : position // 64 + 1].long()
        numbers = self.planes.read("index", 0, self.keys[pages], torch.float32).flatten(0, 1)[: position + 1]
        heads = self.query[token].double().view(-1, DIM)
        weights, products = self.weights[token].double(), (heads @ numbers.double().T).relu()
        return weights @ products, weights.abs() @ products

    def assert_scores(self, got: Tensor, every: int = 1) -> None:
        for token in range(0, len(got), every):
            exact, size = self.expected(token)
            error = float((got[token, : len(exact)].double() - exact).norm() / size.norm().clamp(min=1e-9))
            assert error < 2e-3, (token, len(exact), error)


@pytest.mark.parametrize("heads", [32, 64])
def test_the_self_check_passes(heads: int, cuda: torch.device) -> None:
    for dim in (32, 64, 128):
        deep_gemm.check(cuda, CheckCase("deep_gemm", heads=heads, head_dim=dim))


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("query", [1, 2, 3, 4])
def test_scores_of_decode_rows_are_plain_torchs(query: int, heads: int, cuda: torch.device) -> None:
    contexts = tuple(max(context, query) for context in CONTEXTS)
    filled = Filled(contexts, query, heads, cuda, padding=3)
    plan = deep_gemm.schedule_decode(filled.rows, query)
    got = deep_gemm.decode_scores(filled.query, filled.weights, filled.keys, plan, filled.longest)
    assert got.is_contiguous() and got.shape[1] % 256 == 0
    filled.assert_scores(got)
    filled.assert_scores(dsa.scores(filled.query, filled.weights, filled.keys, filled.rows, filled.longest))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 128, 257])
def test_scores_of_many_rows_are_plain_torchs(count: int, cuda: torch.device) -> None:
    """As many as a block of the schedule holds, and one more."""
    filled = Filled(tuple(1 + 37 * row % 1500 for row in range(count)), 1, 64, cuda)
    plan = deep_gemm.schedule_decode(filled.rows, 1)
    filled.assert_scores(
        deep_gemm.decode_scores(filled.query, filled.weights, filled.keys, plan, 1500), max(count // 40, 1)
    )


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize(("count", "before"), [(1, 0), (2, 63), (129, 0), (300, 64), (257, 4_000), (64, 69_936)])
def test_scores_of_prompts_are_plain_torchs(count: int, before: int, heads: int, cuda: torch.device) -> None:
    context = before + count
    filled = Filled((context,), count, heads, cuda)
    keys = deep_gemm.gather_keys(filled.keys, filled.rows.table_RL[0, : -(-context // 64)])
    plan = deep_gemm.prompt_bounds(filled.rows.positions_T)
    got = deep_gemm.prompt_scores(filled.query, filled.weights, keys, plan, context)
    assert got.is_contiguous() and len(got) == count
    filled.assert_scores(got, max(count // 40, 1))


@pytest.mark.parametrize("query", [1, 2])
def test_a_captured_step_is_the_eager_one(query: int, cuda: torch.device) -> None:
    """Captured while all rows are padding; replayed for other contexts, which it reads from memory."""
    filled = Filled((70, 4_000, 9, 700), query, 64, cuda)
    rows, most = filled.rows, 4_096
    held = QueryRows(rows.rows_T, torch.zeros_like(rows.table_RL), torch.zeros_like(rows.positions_T))

    def step() -> Tensor:
        plan = deep_gemm.schedule_decode(held, query)
        return deep_gemm.decode_scores(filled.query, filled.weights, filled.keys, plan, most)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for shift in (0, 1, 3):  # other rows, so other schedules
        held.table_RL.copy_(rows.table_RL.roll(shift, 0))
        held.positions_T.copy_(rows.positions_T.roll(shift * query))
        graph.replay()
        eager = step()
        for token, position in enumerate(held.positions_T.tolist()):
            assert torch.equal(got[token, : position + 1], eager[token, : position + 1]), (shift, token)
        torch.testing.assert_close(
            eager[0, : int(held.positions_T[0]) + 1],
            dsa.scores(filled.query, filled.weights, filled.keys, held, most)[0, : int(held.positions_T[0]) + 1],
            rtol=1e-2,
            atol=1e-2,
        )


@pytest.mark.parametrize("is_prompt", [False, True])
@pytest.mark.parametrize("count", [2, 64, 140])
def test_keys_that_are_not_written_yet_are_not_read(count: int, is_prompt: bool, cuda: torch.device) -> None:
    """As in test_mla_backends.py: own kernels let the next one start early, and the library's follow them. Each token
    sees a whole block, so that all scores are defined.
    """
    generator, heads = torch.Generator().manual_seed(1), 64
    filled = Filled((256,) * (1 if is_prompt else count), 1, heads, cuda)
    table, rows_T = filled.rows.table_RL, torch.arange(count, device=cuda).int()
    rows = QueryRows(rows_T * (0 if is_prompt else 1), table, torch.full((count,), 255, device=cuda))
    columns = 255 - torch.arange(count, device=cuda) * is_prompt
    places = table[rows.rows_T.long(), columns // 64].long() * 64 + columns % 64
    norm = dsa.KeyNorm(torch.ones(DIM, device=cuda), torch.zeros(DIM, device=cuda), 1e-6)
    angle = torch.ones(256, 32, device=cuda)
    write = KvWrite(angle, angle, rows.positions_T, places)
    downs = normal(generator, 10, count, DIM + heads * (DIM + 1), dtype=torch.bfloat16).to(cuda)

    def step(down: Tensor, wait: bool) -> Tensor:
        key, query, weights = down.split((DIM, heads * DIM, heads), 1)
        weights = weights.float()
        codes = dsa.write(key, query, weights[None], norm, write, filled.keys, 1.0, True)
        if wait:
            torch.cuda.synchronize()
        if is_prompt:
            keys, plan = deep_gemm.gather_keys(filled.keys, table[0]), deep_gemm.prompt_bounds(rows.positions_T)
            out = deep_gemm.prompt_scores(codes, weights, keys, plan, 256)
        else:
            out = deep_gemm.decode_scores(codes, weights, filled.keys, deep_gemm.schedule_decode(rows, 1), 256)
        if wait:
            torch.cuda.synchronize()
        return out

    assert_same_without_waiting(step, downs, cuda)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("shape", [SPARSE, FP8], ids=["bf16", "fp8"])
def test_beside_kernels_it_is_the_references(shape: dict[str, Any], heads: int, cuda: torch.device) -> None:
    own = "triton_sparse"
    choice = KernelConfig(decode=own, prefill=own, kv=RECORD, fp8_index=True, index_scores="deep_gemm")
    assert_beside_the_reference(shape | {"index_n_heads": heads}, choice, shape is FP8, cuda)


def test_an_engine_gives_the_tokens_of_our_kernel(cuda: torch.device, tmp_path: Path) -> None:
    """Captured and eager, past index_topk tokens; a near tie of a choice may move some."""
    (tmp_path / "config.json").write_text(json.dumps(FP8 | {"index_n_heads": 32}))
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(1024) for _ in range(n)) for n in (3000, 100, 2040, 2500)]
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 4
    answers = dict[str, list[list[int]]]()
    for name, flags in (
        ("triton", NAMED | {"dsa_paged_mqa_logits_backend": "triton", "cuda_graph_mode": "none"}),
        ("eager", NAMED | {"cuda_graph_mode": "none"}),
        ("captured", NAMED | {"cuda_graph_mode": "full_and_piecewise"}),
    ):
        of = engine(tmp_path, **flags)
        assert of.config.kernels.index_scores == ("triton" if name == "triton" else "deep_gemm")
        answers[name] = tokens(of, prompts, params)
    assert agreement(answers["eager"], answers["captured"], 4) >= 0.5
    assert agreement(answers["triton"], answers["eager"], 4) >= 0.5
