"""Mixture of experts on the GPU: the cases of every operation, the sort, padding, and that a token's bits do not depend on the others."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from thalweg.kernels.case import Case, Run, normal
from thalweg.kernels.catalog import OPERATIONS
from thalweg.kernels.experts import fp8
from thalweg.kernels.fp8_block.ref import quantize as quantize_blocks

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a CUDA device and triton", allow_module_level=True)

from thalweg.kernels.experts import ext
from thalweg.kernels.experts import triton as experts
from thalweg.kernels.experts.triton import Weights, add_experts_, coverage
from thalweg.kernels.permute.triton import sort
from thalweg.kernels.router import triton as router
from thalweg.kernels.router.triton import Routed, Rule, route

SEED = int(os.environ.get("TEST_SEED", int.from_bytes(os.urandom(3), "little")))


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def every_case() -> list[object]:
    return [
        pytest.param(case, OPERATIONS[name].backends["triton"], id=f"{name}-{case.name}")
        for name in ("experts", "experts_fp8", "permute", "quantize", "router", "silu_mul")
        for case in OPERATIONS[name].cases(draw())
    ]


@pytest.fixture(autouse=True)
def poison() -> object:
    """torch.empty gives NaN and the largest integers: what a kernel forgot to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("case", "run"), every_case())
def test_triton_meets_the_definition(case: Case, run: Run) -> None:
    with torch.inference_mode():
        errors = case.errors(run(**case.given()))
    assert max(errors) <= case.tolerance, f"TEST_SEED={SEED}"


def drawn(experts: int, hidden: int, inner: int, codes: bool) -> Weights:
    generator = draw()
    w13 = normal(generator, experts, 2 * inner, hidden) * hidden**-0.5
    w2 = normal(generator, experts, hidden, inner) * inner**-0.5
    if not codes:
        return Weights(w13.bfloat16().cuda(), w2.bfloat16().cuda())
    pairs = [[quantize_blocks(each, fp8.BLOCK, False) for each in stack] for stack in (w13, w2)]
    (w13, w2), (s13, s2) = ([torch.stack([pair[part] for pair in each]).cuda() for each in pairs] for part in (0, 1))
    return Weights(w13, w2, s13, s2)


def tokens_of(count: int, hidden: int) -> tuple[Tensor, Tensor]:
    generator = draw()
    x, out = (normal(generator, count, hidden, dtype=torch.bfloat16).cuda() for _ in range(2))
    return x, out


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    ("pairs", "experts", "block"), [(1, 5, 16), (128, 9, 16), (129, 9, 64), (513, 33, 16), (9000, 257, 128)]
)
def test_sort_is_stable_and_covers_every_pair_once(pairs: int, experts: int, block: int, aligned: bool) -> None:
    ids = torch.randint(0, experts + 1, (pairs,), generator=draw()).int()
    by = sort(ids.cuda().view(-1, 1), experts, block, aligned)
    order, slot, expert, row, end = (each.tolist() for each in (by.order, by.slot_P, by.expert, by.row, by.end_N))
    total = int(by.total)
    assert total <= by.tiles
    found = []
    for tile in range(total):
        assert not aligned or row[tile] == tile * block
        for position in range(row[tile], min(end[expert[tile]], row[tile] + block)):
            assert ids[order[position]] == expert[tile] and slot[order[position]] == position
            found.append(order[position])
    assert found == [pair for pair in ids.argsort(stable=True).tolist() if ids[pair] < experts], f"TEST_SEED={SEED}"


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
def test_padding_changes_nothing_and_reads_nothing(tokens: int, codes: bool) -> None:
    """A token of padding keeps its residual, even where its activations are no numbers, and the others do not notice."""
    rule = Rule(6, 2, 1.0, 1, 1, "greedy", False, 1)
    weights, gate = drawn(7, 256, 128, codes), normal(draw(), 6, 256).cuda()
    x, out = tokens_of(tokens, 256)
    real = torch.arange(tokens, device=x.device) != tokens // 2
    whole, part = out.clone(), out.clone()
    add_experts_(whole, x, route(x, gate, None, rule, quantise=codes), weights)
    x[tokens // 2] = torch.nan
    routed = route(x, gate, None, rule, real, quantise=codes)
    add_experts_(part, x, routed, weights)
    assert torch.equal(part[~real], out[~real])
    assert torch.equal(part[real], whole[real]), f"TEST_SEED={SEED}"
    assert routed.ids_TK[~real].eq(7).all() and routed.weights_TK[~real].eq(0).all()


@pytest.mark.parametrize("codes", [False, True])
def test_deterministic_mode_does_not_depend_on_the_batch(codes: bool) -> None:
    rule = Rule(16, 4, 2.5, 4, 2, "noaux_tc", True, 1)
    weights, gate = drawn(17, 512, 256, codes), (normal(draw(), 16, 512) * 0.05).cuda()
    bias = normal(draw(), 16).cuda()
    x, out = tokens_of(500, 512)
    alone: list[Tensor] = []
    for count in (1, 2, 17, 500):
        part = out[:count].clone()
        add_experts_(part, x[:count], route(x[:count], gate, bias, rule, None, codes, True), weights, True)
        alone.append(part[0])
    assert all(torch.equal(each, alone[0]) for each in alone[1:]), f"TEST_SEED={SEED}"


def test_router_is_exact_where_tf32_is_not() -> None:
    """Logits that differ by less than tf32 or bf16 could tell are told apart."""
    weight = torch.zeros(64, 2048, device="cuda")
    weight[:, 0] = 1.0 + torch.arange(64, device="cuda") * 2.0**-20
    x = torch.zeros(3, 2048, device="cuda", dtype=torch.bfloat16)
    x[:, 0] = 3.0
    for tokens in (1, 3):
        routed = route(x[:tokens], weight, None, Rule(64, 4, 1.0, 1, 1, "greedy", False, 0))
        assert routed.ids_TK.tolist() == [[63, 62, 61, 60]] * tokens


def test_ties_go_to_the_lower_id() -> None:
    x = torch.ones(2, 256, device="cuda", dtype=torch.bfloat16)
    routed = route(x, torch.ones(8, 256, device="cuda"), None, Rule(8, 3, 1.0, 1, 1, "greedy", False, 2))
    assert routed.ids_TK.tolist() == [[0, 1, 2, 8, 9]] * 2
    assert torch.allclose(routed.weights_TK, torch.tensor([0.125] * 3 + [1.0] * 2, device="cuda"))


def test_coverage_counts_routed_experts_only() -> None:
    ids = torch.tensor([[0, 3, 8], [3, 5, 8], [9, 9, 9]], dtype=torch.int32, device="cuda")
    assert int(coverage(ids, 8)) == 3


def test_after_the_warm_up_nothing_compiles() -> None:
    """Running the numbers of tokens that `starts` names compiles what any other number needs."""
    from triton import knobs

    rule = Rule(8, 2, 1.0, 1, 1, "greedy", False, 1)
    weights, gate = drawn(9, 256, 128, False), normal(draw(), 8, 256).cuda().bfloat16()
    compiled: list[object] = []

    def step(tokens: int) -> None:
        x, out = tokens_of(tokens, 256)
        add_experts_(out, x, route(x, gate, None, rule), weights)

    for tokens in sorted({*router.starts(8, 256, 900), *experts.starts(3, 9, False, 900)}):
        step(tokens)
    knobs.runtime.jit_post_compile_hook = lambda *given, **more: compiled.append(more)
    try:
        for tokens in (1, 2, 3, 5, 16, 31, 64, 100, 171, 172, 333, 500, 683, 900):
            step(tokens)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not compiled


def test_deep_gemm_agrees() -> None:
    if not ext.available():
        pytest.skip("deep_gemm is not installed, or this is no Hopper")
    ext.check(torch.device("cuda"))
    weights = drawn(9, 512, 256, True)
    x, out = tokens_of(300, 512)
    ids = torch.stack([torch.randperm(9, generator=draw())[:3] for _ in range(300)]).int().cuda()
    ids[7] = 9
    scale = torch.rand(300, 3, generator=draw()).cuda()
    assert weights.s13 is not None and weights.s2 is not None
    w13, w2 = (weights.w13_NIH.cpu(), weights.s13.cpu()), (weights.w2_NHI.cpu(), weights.s2.cpu())
    exact = fp8.add_experts_(out.cpu().double(), x.cpu(), ids.cpu(), scale.cpu(), w13, w2)
    ext.add_experts_(out, x, Routed(scale, ids), weights)
    # bf16 between the product and silu moves one code in twenty
    assert float((out.cpu().double() - exact).abs().max() / exact.abs().max()) < 4e-2, f"TEST_SEED={SEED}"
