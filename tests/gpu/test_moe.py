"""Mixture of experts on the GPU: the cases of every operation, the sort, padding, and that a token's bits do not depend
on other tokens.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from tests.seed import SEED
from thalweg.core.kernels import CheckCase
from thalweg.kernels.case import KernelCase, Run, normal
from thalweg.kernels.catalog import OPERATIONS
from thalweg.kernels.fp8_block.ref import quantize as quantize_blocks

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a CUDA device and triton", allow_module_level=True)

from thalweg.kernels.batch_invariant_gemm import triton as batch_invariant_gemm
from thalweg.kernels.experts import backends, ext
from thalweg.kernels.experts import triton as experts
from thalweg.kernels.experts.triton import ExpertWeights, coverage, run_experts
from thalweg.kernels.gemm import deep_gemm
from thalweg.kernels.gemm import fp8 as fp8_gemm
from thalweg.kernels.gemm.epilogue import Epilogue
from thalweg.kernels.moe_align.triton import sort, way_of
from thalweg.kernels.norm.triton import rms_norm
from thalweg.kernels.quantize.triton import quantize
from thalweg.kernels.router import triton as router
from thalweg.kernels.router.ref import RouterConfig
from thalweg.kernels.router.triton import RouterOutput, route
from thalweg.kernels.silu_mul.triton import silu_mul, silu_mul_quantize

CASES = (
    "batch_invariant_gemm",
    "expert_slots",
    "experts",
    "experts_fp8",
    "moe_align",
    "pack_rows",
    "quantize",
    "router",
    "silu_mul",
    "weight_only",
    "weight_only_experts",
)


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def every_case() -> list[object]:
    return [
        pytest.param(case, OPERATIONS[name].backends["triton"], id=f"{name}-{case.name}")
        for name in CASES
        for case in OPERATIONS[name].cases(draw())
    ]


@pytest.fixture(autouse=True)
def poison() -> object:
    """torch.empty gives NaN and the largest integers: what a kernel forgot to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("case", "run"), every_case())
def test_triton_meets_the_definition(case: KernelCase, run: Run) -> None:
    with torch.inference_mode():
        errors = case.errors(run(**case.fresh_inputs()))
    assert max(errors) <= case.tolerance, f"TEST_SEED={SEED}"


def drawn(experts: int, hidden: int, inner: int, codes: bool) -> ExpertWeights:
    generator = draw()
    w13 = normal(generator, experts, 2 * inner, hidden) * hidden**-0.5
    w2 = normal(generator, experts, hidden, inner) * inner**-0.5
    if not codes:
        return ExpertWeights(w13.bfloat16().cuda(), w2.bfloat16().cuda())
    pairs = [[quantize_blocks(each, (128, 128), False) for each in stack] for stack in (w13, w2)]
    (w13, w2), (s13, s2) = ([torch.stack([pair[part] for pair in each]).cuda() for each in pairs] for part in (0, 1))
    return ExpertWeights(w13, w2, s13, s2)


def tokens_of(count: int, hidden: int) -> tuple[Tensor, Tensor]:
    generator = draw()
    x, out = (normal(generator, count, hidden, dtype=torch.bfloat16).cuda() for _ in range(2))
    return x, out


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    ("pairs", "experts", "block"),
    [(1, 5, 16), (128, 9, 16), (129, 9, 64), (513, 33, 16), (2049, 33, 16), (9000, 257, 128)],
)
def test_sort_is_stable_and_covers_every_pair_once(pairs: int, experts: int, block: int, aligned: bool) -> None:
    ids = torch.randint(0, experts + 1, (pairs,), generator=draw()).int()
    by = sort(ids.cuda().view(-1, 1), experts, block, aligned)
    sorted_pairs = by.pair, by.position_P, by.tile_expert, by.tile_row, by.end_N
    order, slot, expert, row, end = (each.tolist() for each in sorted_pairs)
    total = int(by.tiles)
    assert total <= by.most_tiles
    found = []
    for tile in range(total):
        assert not aligned or row[tile] == tile * block
        for position in range(row[tile], min(end[expert[tile]], row[tile] + block)):
            assert ids[order[position]] == expert[tile] and slot[order[position]] == position
            found.append(order[position])
    assert found == [pair for pair in ids.argsort(stable=True).tolist() if ids[pair] < experts], f"TEST_SEED={SEED}"


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 40, 300])
def test_padding_changes_nothing_and_reads_nothing(tokens: int, codes: bool) -> None:
    """A token of padding keeps its residual, even where its activations are no numbers, and the others do not
    notice.
    """
    rule = RouterConfig(6, 2, 1.0, 1, 1, "greedy", False, 1)
    weights, gate = drawn(7, 256, 128, codes), normal(draw(), 6, 256).cuda()
    x, out = tokens_of(tokens, 256)
    real = torch.arange(tokens, device=x.device) != tokens // 2
    whole, part = out.clone(), out.clone()
    run_experts(whole, x, route(x, gate, None, rule, with_codes=codes), weights)
    x[tokens // 2] = torch.nan
    routed = route(x, gate, None, rule, real, with_codes=codes)
    run_experts(part, x, routed, weights)
    assert torch.equal(part[~real], out[~real])
    assert torch.equal(part[real], whole[real]), f"TEST_SEED={SEED}"
    assert routed.ids_TK[~real].eq(7).all() and routed.weights_TK[~real].eq(0).all()


@pytest.mark.parametrize("codes", [False, True])
def test_deterministic_mode_does_not_depend_on_the_batch(codes: bool) -> None:
    rule = RouterConfig(16, 4, 2.5, 4, 2, "noaux_tc", True, 1)
    weights, gate = drawn(17, 512, 256, codes), (normal(draw(), 16, 512) * 0.05).cuda()
    bias = normal(draw(), 16).cuda()
    x, out = tokens_of(500, 512)
    alone: list[Tensor] = []
    for count in (1, 2, 17, 500):
        part = out[:count].clone()
        run_experts(part, x[:count], route(x[:count], gate, bias, rule, None, codes, True), weights, deterministic=True)
        alone.append(part[0])
    assert all(torch.equal(each, alone[0]) for each in alone[1:]), f"TEST_SEED={SEED}"


def test_router_is_exact_where_tf32_is_not() -> None:
    """Logits that differ by less than tf32 or bf16 could tell are told apart."""
    weight = torch.zeros(64, 2048, device="cuda")
    weight[:, 0] = 1.0 + torch.arange(64, device="cuda") * 2.0**-20
    x = torch.zeros(3, 2048, device="cuda", dtype=torch.bfloat16)
    x[:, 0] = 3.0
    for tokens in (1, 3):
        routed = route(x[:tokens], weight, None, RouterConfig(64, 4, 1.0, 1, 1, "greedy", False, 0))
        assert routed.ids_TK.tolist() == [[63, 62, 61, 60]] * tokens


@pytest.mark.parametrize("codes", [False, True])
def test_many_tokens_are_routed_as_few_are(codes: bool) -> None:
    """From `MANY` tokens on a library multiplies: the same weights, and the same experts but at a near tie."""
    x, _ = tokens_of(router.MANY, 512)
    gate, bias = (normal(draw(), 64, 512) * 0.05).bfloat16().cuda(), normal(draw(), 64).cuda()
    rule = RouterConfig(64, 6, 2.5, 8, 4, "noaux_tc", True, 1)
    many, few = (route(x, gate, bias, rule, None, codes, own) for own in (False, True))
    dense = [
        torch.zeros(len(x), 66, device="cuda").scatter_(1, one.ids_TK.long(), one.weights_TK) for one in (many, few)
    ]
    same = ((dense[0] > 0) == (dense[1] > 0)).all(1)
    assert same.float().mean() > 0.99 and torch.allclose(dense[0][same], dense[1][same], atol=1e-5), f"TEST_SEED={SEED}"
    if codes:
        assert many.codes_TH is not None and few.codes_TH is not None
        assert torch.equal(many.codes_TH.view(torch.uint8), few.codes_TH.view(torch.uint8))


def test_ties_go_to_the_lower_id() -> None:
    x = torch.ones(2, 256, device="cuda", dtype=torch.bfloat16)
    routed = route(x, torch.ones(8, 256, device="cuda"), None, RouterConfig(8, 3, 1.0, 1, 1, "greedy", False, 2))
    assert routed.ids_TK.tolist() == [[0, 1, 2, 8, 9]] * 2
    assert torch.allclose(routed.weights_TK, torch.tensor([0.125] * 3 + [1.0] * 2, device="cuda"))


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("tokens", [300, 1000])
def test_tiles_of_shared_experts_stand_anywhere(tokens: int, codes: bool) -> None:
    """Spread among the others or behind them: the same bits."""
    rule = RouterConfig(6, 2, 1.0, 1, 1, "greedy", False, 2)
    weights, gate = drawn(8, 256, 128, codes), normal(draw(), 6, 256).cuda()
    x, out = tokens_of(tokens, 256)
    routed = route(x, gate, None, rule, torch.arange(tokens, device=x.device) % 7 > 0, with_codes=codes)
    spread, behind = out.clone(), out.clone()
    run_experts(spread, x, routed, weights)
    run_experts(behind, x, routed._replace(shared=0), weights)
    assert not torch.equal(spread, out) and torch.equal(spread, behind), f"TEST_SEED={SEED}"


@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (384, 200)])
def test_weights_by_tma_give_the_same_sums(hidden: int, inner: int) -> None:
    """As the kernels of fewer tokens, with tiles that end inside a dim."""
    tokens, weights = experts.MANY + 1, drawn(8, hidden, inner, False)
    gate, rule = normal(draw(), 8, hidden).cuda(), RouterConfig(8, 3, 1.0, 1, 1, "greedy", False)
    x, out = tokens_of(tokens, hidden)
    routed = route(x, gate, None, rule, torch.arange(tokens, device=x.device) % 7 > 0)
    assert experts.plan_of(tokens, 3, weights, False)[0] == "tma"
    by_tma, others = out.clone(), out.clone()
    run_experts(by_tma, x, routed, weights)
    run_experts(others, x, routed, weights, plan=("sorted", experts.tabled("sorted", tokens, 3, 8, False)))
    assert float((by_tma - others).abs().max() / others.abs().max()) < 1e-2, f"TEST_SEED={SEED}"


def test_coverage_counts_routed_experts_only() -> None:
    ids = torch.tensor([[0, 3, 8], [3, 5, 8], [9, 9, 9]], dtype=torch.int32, device="cuda")
    assert int(coverage(ids, 8)) == 3


def starts(most: int) -> list[int]:
    """Numbers of tokens, up to `most`, at which other kernels of the layer below begin."""
    keys: list[object] = []
    for tokens in range(1, most + 1):
        by = experts.path(tokens, False, False, True)
        sorts = way_of(3 * tokens) if by == "sorted" else None
        scores = router.tiles(tokens, 8, 256, False), tokens <= router.FEW, tokens >= router.MANY
        keys.append((by, experts.tabled(by, tokens, 3, 9, False), sorts, tokens <= experts.SHARED_FIRST, scores))
    return [i + 1 for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]


def test_after_the_warm_up_nothing_compiles() -> None:
    """Running the numbers of tokens that `starts` names compiles what any other number needs."""
    from triton import knobs

    rule = RouterConfig(8, 2, 1.0, 1, 1, "greedy", False, 1)
    weights, gate = drawn(9, 256, 128, False), normal(draw(), 8, 256).cuda().bfloat16()
    compiled: list[object] = []

    def step(tokens: int) -> None:
        x, out = tokens_of(tokens, 256)
        run_experts(out, x, route(x, gate, None, rule), weights)

    for tokens in starts(900):
        step(tokens)
    knobs.runtime.jit_post_compile_hook = lambda *given, **more: compiled.append(more)
    try:
        for tokens in (1, 2, 3, 5, 16, 31, 64, 100, 171, 172, 333, 500, 683, 900):
            step(tokens)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not compiled


needs_deep_gemm = pytest.mark.skipif(
    not deep_gemm.available(), reason="deep_gemm is not installed, or this is no Hopper"
)


@needs_deep_gemm
@pytest.mark.parametrize("codes", [False, True])
def test_deep_gemm_agrees(codes: bool) -> None:
    ext.check(torch.device("cuda"), CheckCase(is_fp8=codes))
    weights = drawn(9, 512, 256, codes)
    x, out = tokens_of(300, 512)
    ids = torch.stack([torch.randperm(9, generator=draw())[:3] for _ in range(300)]).int().cuda()
    ids[7] = 9
    scale = torch.rand(300, 3, generator=draw()).cuda()
    own = out.clone()
    run_experts(own, x, RouterOutput(scale, ids), weights)  # held against float64 by its cases
    ext.run_experts(out, x, RouterOutput(scale, ids), weights)
    # bf16 between the product and silu moves one code in twenty
    assert float((out.double() - own.double()).abs().max() / own.double().abs().max()) < 4e-2, f"TEST_SEED={SEED}"


@pytest.mark.parametrize("codes", [False, True])
def test_long_steps_are_computed_in_pieces(codes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as one by one: what is cut are views that begin anywhere."""
    rule = RouterConfig(8, 2, 1.0, 1, 1, "greedy", False, 1)
    weights, gate = drawn(9, 256, 128, codes), normal(draw(), 8, 256).cuda()
    x, out = tokens_of(70, 256)
    routed = route(x, gate, None, rule, with_codes=codes, deterministic=True)
    whole, cut, run = out.clone(), out.clone(), backends.runner("triton", deterministic=True)
    run(whole, x, routed, weights)
    monkeypatch.setattr(backends, "MOST_TOKENS", 32)
    run(cut, x, routed, weights)
    assert torch.equal(whole, cut), f"TEST_SEED={SEED}"


def test_more_rows_than_a_grid_is_wide() -> None:
    """A grid's second axis ends at 65,535: steps of 131,072 tokens with nine experts each have more blocks of rows."""
    rows = 65535 * 16 + 17
    gate_up = normal(draw(), 1, 256, dtype=torch.bfloat16).cuda().expand(rows, -1).contiguous()
    codes, scales = silu_mul_quantize(gate_up)
    assert torch.equal(codes[-1].view(torch.uint8), codes[0].view(torch.uint8)) and scales[-1] == scales[0]
    assert torch.equal(silu_mul(gate_up)[-1], silu_mul(gate_up[:1])[0])
    codes, scales = quantize(gate_up)
    assert torch.equal(codes[-1].view(torch.uint8), codes[0].view(torch.uint8)) and torch.equal(scales[-1], scales[0])


def fp8_weight(outputs: int, inner: int) -> tuple[Tensor, Tensor]:
    codes, scale = quantize_blocks(normal(draw(), outputs, inner) * inner**-0.5, (128, 128), False)
    return codes.cuda(), scale.cuda()


def test_fp8_products_of_many_rows_do_without_cublas_where_it_has_no_block_scaling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.nn.functional, "scaled_mm", raising=False)
    assert not fp8_gemm._flat.__wrapped__(torch.device("cuda"))


@pytest.mark.parametrize("backend", sorted(fp8_gemm.PRODUCTS))
def test_fp8_products_agree(backend: str) -> None:
    if "deep_gemm" in backend and not deep_gemm.available():
        pytest.skip("deep_gemm is not installed, or this is no Hopper")
    fp8_gemm.check(torch.device("cuda"), CheckCase(backend))
    weight, scale = fp8_weight(320, 1024)
    for rows in (1, 20, 70, 129):
        x, _ = tokens_of(rows, 1024)
        residual = normal(draw(), rows, 320, dtype=torch.bfloat16).cuda()
        exact = x.double() @ (weight.double() * scale.repeat_interleave(128, 0)[:320].repeat_interleave(128, 1)).t()
        y = fp8_gemm.product(backend)(x, weight, scale)
        assert float((y.double() - exact).norm() / exact.norm()) < 0.04, f"{rows}, TEST_SEED={SEED}"
        added = fp8_gemm.product(backend)(x, weight, scale, Epilogue(residual_MN=residual.clone()))
        # one more rounding to bf16 where a library's result is added
        assert torch.allclose(added.float(), y.float() + residual.float(), rtol=2e-2, atol=2e-2), f"TEST_SEED={SEED}"


COUNTS = (*range(1, 301), 4096)


@pytest.mark.parametrize("outputs", [96, 4500, 13000])
@pytest.mark.parametrize("codes", [False, True])
def test_a_deterministic_product_is_the_same_in_every_batch(outputs: int, codes: bool) -> None:
    x, _ = tokens_of(4096, 512)
    fp32 = Epilogue(dtype=torch.float32)
    if codes:
        weight, scale = fp8_weight(outputs, 512)
        alone = torch.cat([batch_invariant_gemm.linear_fp8(row, weight, scale) for row in x[:300].split(1)])
    else:
        weight = (normal(draw(), outputs, 512) * 512**-0.5).bfloat16().cuda()
        alone = torch.cat([batch_invariant_gemm.linear(row, weight, fp32) for row in x[:300].split(1)])
    for count in COUNTS:
        together = (
            batch_invariant_gemm.linear_fp8(x[:count], weight, scale)
            if codes
            else batch_invariant_gemm.linear(x[:count], weight, fp32)
        )
        assert torch.equal(together[:300], alone[:count]), f"{count} rows, TEST_SEED={SEED}"


def test_rows_stand_alone_between_the_products() -> None:
    """Norm, activation, quantising and the router: bit for bit the same in every batch."""
    x, _ = tokens_of(4096, 512)
    weight, gate = torch.rand(512, generator=draw()).cuda(), normal(draw(), 64, 512).cuda()
    rule = RouterConfig(64, 6, 1.0, 1, 1, "greedy", False, 2)

    def rows(x_TH: Tensor) -> list[Tensor]:
        routed = route(x_TH, gate, None, rule, deterministic=True)
        codes, scales = quantize(x_TH)
        inner, inner_scales = silu_mul_quantize(x_TH)
        between = [
            rms_norm(x_TH, weight, 1e-6),
            silu_mul(x_TH),
            codes.view(torch.uint8),
            scales,
            inner.view(torch.uint8),
            inner_scales,
        ]
        return [*between, routed.weights_TK, routed.ids_TK]

    alone = [torch.cat(parts) for parts in zip(*(rows(row) for row in x[:300].split(1)), strict=True)]
    for count in COUNTS[::7] + COUNTS[-1:]:
        for together, one in zip(rows(x[:count]), alone, strict=True):
            assert torch.equal(together[:300], one[:count]), f"{count} rows, TEST_SEED={SEED}"


@pytest.mark.parametrize("codes", [False, True])
def test_deterministic_experts_over_many_counts(codes: bool) -> None:
    rule = RouterConfig(16, 4, 2.5, 4, 2, "noaux_tc", True, 1)
    weights, gate, bias = drawn(17, 256, 128, codes), (normal(draw(), 16, 256) * 0.05).cuda(), normal(draw(), 16).cuda()
    x, out = tokens_of(4096, 256)
    run = backends.runner("triton", deterministic=True)

    def layer(count: int, first: int = 0) -> Tensor:
        part, seen = out[first : first + count].clone(), x[first : first + count]
        run(part, seen, route(seen, gate, bias, rule, None, codes, True), weights)
        return part

    alone = torch.cat([layer(1, first) for first in range(300)])
    for count in COUNTS[::7] + COUNTS[-1:]:
        assert torch.equal(layer(count)[:300], alone[:count]), f"{count} tokens, TEST_SEED={SEED}"
