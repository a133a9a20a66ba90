"""FlashMLA's sparse attention: beside plain torch, under models, under graphs, and behind kernels that overlap.

python -m pytest tests/gpu/test_sparse_libraries.py
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
from tests.gpu.test_sparse import FP8, TOPK, assert_beside_the_reference
from thalweg.config.backends import DECODE, installed_libraries
from thalweg.config.entry_point import load_entry
from thalweg.core.kernels import RECORD, CheckCase, KernelConfig
from thalweg.core.sampling import SamplingParams
from thalweg.kernels.attend.args import KvWrite, LatentPlane, QueryRows
from thalweg.kernels.case import normal
from thalweg.kernels.dsa import flashmla
from thalweg.kernels.dsa.backends import SparseKernel, SparseShape
from thalweg.kernels.rope.triton import LatentNorm, mla_absorb
from thalweg.memory.planes import Planes, record_plane, vector_plane

pytestmark = pytest.mark.skipif("flashmla" not in installed_libraries(), reason="flash_mla is not installed")
BACKENDS, OWN = ("flashmla_sparse", "flashmla_kv"), "triton_sparse"
PAIRS = [(decode, prefill) for of in BACKENDS for decode, prefill in ((of, of), (of, OWN), (OWN, of))]
PAGES = 96  # of a row


def kernel(backend: str, topk: int) -> SparseKernel:
    made: SparseKernel = load_entry(DECODE[backend].sparse)(SparseShape(512, topk, 0.05))
    return made


def filled(backend: str, pages: int, generator: torch.Generator, device: torch.device) -> Planes:
    """Latents of every place, in the type that the backend reads."""
    spec = record_plane(0, 512, 64) if backend == "flashmla_kv" else vector_plane("latent", 0, 576, torch.bfloat16)
    planes = Planes((spec,), pages, device)
    places = torch.arange(pages * 64, device=device)
    planes.write("latent", 0, places, normal(generator, len(places), 576, dtype=torch.bfloat16).to(device))
    return planes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_the_self_check_passes(heads: int, backend: str, cuda: torch.device) -> None:
    flashmla.check(cuda, CheckCase(backend, heads))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [16, 64, 96, 128])
@pytest.mark.parametrize("count", [1, 3, 70, 600])
def test_attention_is_plain_torchs(count: int, heads: int, backend: str, cuda: torch.device) -> None:
    """Contexts past the choice, shorter ones, and one of a single token; in one launch and in two; along the paths of
    a tree; and of contexts that are chosen whole.
    """
    generator, rows = torch.Generator().manual_seed(count), min(count, 3)
    planes = filled(backend, 1 + rows * PAGES, generator, cuda)
    table = (1 + torch.randperm(rows * PAGES, generator=generator)).view(rows, PAGES).to(cuda, torch.int32)
    rows_T = (torch.arange(count) * rows // count).to(cuda, torch.int32)
    positions = torch.randint(TOPK, PAGES * 64, (count,), generator=generator)
    positions[1::3], positions[2:3] = positions[1::3] % 500, 0
    positions = positions.to(cuda)
    query = normal(generator, count, heads, 576, dtype=torch.bfloat16).to(cuda)
    uv = (normal(generator, heads, 128, 512, dtype=torch.bfloat16) * 0.05).to(cuda).transpose(1, 2)
    chosen = torch.full((count, TOPK), -1, dtype=torch.int32)
    for token, position in enumerate(positions.tolist()):
        some = torch.randperm(position + 1, generator=generator)[:TOPK].sort().values
        chosen[token, : len(some)] = some
    chosen = chosen.to(cuda)
    # of a tree each token lies two columns behind its position, and sees its own and those three further back
    back = torch.arange(64, device=cuda)
    paths = (positions.unsqueeze(1) + 2 - back - 2 * (back > 0)).clamp(min=0).to(torch.int32)
    positions_below = positions.clamp(max=PAGES * 64 - 3)
    latents = planes.read("latent", 0, planes.tokens("latent", 0), torch.float32)
    of = kernel(backend, TOPK)
    for name, chosen_TK, positions_T, paths_TD in (
        ("a choice", chosen, positions, None),
        ("all", None, positions.clamp(max=TOPK - 1), None),
        ("a tree", chosen, positions_below, paths),
    ):
        given = QueryRows(rows_T, table, positions_T, paths_TD)
        got = of.attend(query, LatentPlane(planes.paged("latent", 0)), chosen_TK, given, uv, {}).float()
        for token in range(0, count, max(count // 40, 1)):
            position = int(positions_T[token])
            columns = torch.arange(position + 1, device=cuda) if chosen_TK is None else chosen_TK[token].long()
            columns = columns[(columns >= 0) & (columns <= position)]
            if paths_TD is not None:
                age = position - columns
                columns = torch.where(age < 64, paths_TD[token, age.clamp(max=63)].long(), columns)
            seen = latents[table[rows_T[token], columns // 64].long() * 64 + columns % 64]
            sums = (0.05 * query[token].float() @ seen.T).softmax(-1) @ seen[:, :512]
            exact = torch.einsum("hr,hrv->hv", sums, uv.float()).flatten()
            assert float((got[token] - exact).norm() / exact.norm()) < 0.02, (name, token)


@pytest.mark.parametrize("heads", [32, 64, 128])
@pytest.mark.parametrize(("decode", "prefill"), PAIRS)
@pytest.mark.parametrize("shape", [SPARSE, FP8], ids=["bf16", "fp8"])
def test_beside_kernels_it_is_the_references(
    shape: dict[str, Any], decode: str, prefill: str, heads: int, cuda: torch.device
) -> None:
    is_record = "flashmla_kv" in (decode, prefill)
    choice = KernelConfig(decode=decode, prefill=prefill, kv=RECORD if is_record else "", fp8_index=is_record)
    assert_beside_the_reference(shape | {"num_attention_heads": heads}, choice, shape is FP8, cuda)


@pytest.mark.parametrize(("decode", "prefill"), PAIRS)
def test_kernels_under_graphs_are_the_eager_ones(decode: str, prefill: str, cuda: torch.device, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SPARSE | {"num_attention_heads": 64}))
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(1024) for _ in range(n)) for n in (3000, 100, 2040, 2500)]
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 4
    named = {"dsa_decode_backend": decode, "dsa_prefill_backend": prefill}
    wishes = {flag: "triton" if name == OWN else name for flag, name in named.items()}
    wishes["kv_cache_dtype"] = RECORD if "flashmla_kv" in (decode, prefill) else None
    captured, eager = (engine(tmp_path, cuda_graph_mode=mode, **wishes) for mode in ("full_and_piecewise", "none"))
    kernels = captured.config.kernels
    assert (kernels.decode, kernels.prefill) == (decode, prefill) and captured.config.cuda_graph_bs
    assert agreement(tokens(captured, prompts, params), tokens(eager, prompts, params), 4) >= 0.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [2, 64, 140])
@pytest.mark.parametrize("heads", [64, 128])
def test_attention_does_not_read_kv_that_is_not_written_yet(
    heads: int, count: int, backend: str, cuda: torch.device
) -> None:
    """As in test_mla_backends.py: own kernels let the next one start early, and follow the library's. Seen only while
    the device is behind the host: each step is queued behind a long one, and must be what it is by itself.
    """
    generator, topk = torch.Generator().manual_seed(1), 256
    planes = filled(backend, 1 + 2 * count, generator, cuda)
    latents = LatentPlane(planes.paged("latent", 0))
    table = torch.arange(1, 1 + 2 * count, dtype=torch.int32).view(count, 2).to(cuda)
    positions = torch.full((count,), 100, device=cuda)
    write = table[:, 1].long() * 64 + 36
    uk, uv = (normal(generator, heads, *s, dtype=torch.bfloat16).to(cuda) * 0.1 for s in ((128, 512), (512, 128)))
    downs = normal(generator, 10, count, heads * 192 + 576, dtype=torch.bfloat16).to(cuda)
    angle, weight = torch.ones(2048, 32, device=cuda), torch.ones(512, device=cuda)
    rows, of = QueryRows(torch.arange(count, device=cuda).int(), table, positions), kernel(backend, topk)
    schedules = dict[int, Any]()

    def step(down: Tensor, wait: bool) -> Tensor:
        queries, latent = down[:, : heads * 192].view(count, heads, 192), down[:, heads * 192 :]
        absorbed = mla_absorb(queries, uk, latent, LatentNorm(weight), KvWrite(angle, angle, positions, write), latents)
        if wait:
            torch.cuda.synchronize()
        out = of.attend(absorbed, latents, None, rows, uv, schedules)
        if wait:
            torch.cuda.synchronize()
        return out

    assert_same_without_waiting(step, downs, cuda)
