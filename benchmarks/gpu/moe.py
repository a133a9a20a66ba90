"""Mixture of experts on one GPU: every kernel against plain torch, then times against the floor: `python
benchmarks/gpu/moe.py [s]`.

Writes $OUT/moe.json (OUT: the current folder if unset). Times: CUDA-graph replays of eight calls with other tokens
each, so that weights come from memory. Floor: the weights of the experts that are chosen (counted, not assumed) read
once, or the products, whichever takes longer at the ceilings that the same run measures. Checks come first; then the
table of tiles as it is; then other tiles while time is left (90 seconds in all unless told).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from thalweg.kernels.experts import ext
from thalweg.kernels.experts import triton as experts
from thalweg.kernels.experts.fp8 import rounded
from thalweg.kernels.experts.triton import ExpertTile, ExpertTiles, ExpertWeights
from thalweg.kernels.fp8_block.ref import dequantize
from thalweg.kernels.fp8_block.ref import quantize as quantize_blocks
from thalweg.kernels.gemm import deep_gemm
from thalweg.kernels.moe_align import triton as moe_align
from thalweg.kernels.quantize.triton import quantize
from thalweg.kernels.router import ref as router_ref
from thalweg.kernels.router import triton as router
from thalweg.kernels.router.ref import RouterConfig
from thalweg.kernels.router.triton import RouterOutput
from thalweg.kernels.silu_mul.triton import silu_mul, silu_mul_quantize

CUDA = torch.device("cuda")
COPIES = 8  # calls in a graph, each with its own tokens


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    inner: int
    rule: RouterConfig
    fp8: bool

    @property
    def stack(self) -> int:
        return self.rule.experts + self.rule.shared

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.inner * (1 if self.fp8 else 2)


LITE = Shape("deepseek-v2-lite", 2048, 1408, RouterConfig(64, 6, 1.0, 1, 1, "greedy", False, 2), False)
SLIM = Shape("deepseek-v3-slim", 7168, 2048, RouterConfig(256, 8, 2.5, 8, 4, "noaux_tc", True, 1), True)


class Log:
    """Rows for the table and the file, and how much time is left."""

    def __init__(self, seconds: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def attempt(self, name: str, run: Callable[..., dict[str, Any]], *given: Any, **more: Any) -> None:
        """A crash of one case must not hide the others."""
        try:
            row = {"case": name} | run(*given, **more)
        except Exception:  # noqa: BLE001 - whatever a kernel or its compiler throws is a result here
            self.failed.append(name)
            print(f"{name}: FAILED\n{traceback.format_exc(limit=-4)}", flush=True)
            return
        self.rows.append(row)
        print(
            "  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()),
            flush=True,
        )


def timed(calls: list[Callable[[], object]], seconds: float = 0.15) -> float:
    """Seconds of one call, in a CUDA graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    repeats = 1
    while True:
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        took = start.elapsed_time(end) / 1e3
        if took >= seconds / 3 or repeats >= 4096:
            return took / repeats / len(calls)
        repeats = max(2 * repeats, int(repeats * seconds / max(took, 1e-5)))


def ceilings() -> dict[str, float]:
    """Bytes a second of a read-only sum, FLOP/s of a bf16 product and of an FP8 one with a scale a tensor."""
    big = torch.ones(1 << 30, dtype=torch.float32, device=CUDA)
    read = big.numel() * 4 / timed([big.sum])
    n = 8192
    a, b = torch.randn(n, n, device=CUDA, dtype=torch.bfloat16), torch.randn(n, n, device=CUDA, dtype=torch.bfloat16)
    bf16 = 2 * n**3 / timed([lambda: a @ b])
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=CUDA)
    fp8 = (
        2
        * n**3
        / timed([lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)])
    )
    return {"read": read, "bf16": bf16, "fp8": fp8}


def draw_ids(tokens: int, rule: RouterConfig) -> RouterOutput:
    """Uniform routing with the shared experts."""
    ids = torch.rand(tokens, rule.experts, device=CUDA).topk(rule.topk).indices.int()
    shared = torch.arange(rule.experts, rule.experts + rule.shared, device=CUDA, dtype=torch.int32).expand(tokens, -1)
    weights = torch.cat([torch.rand(tokens, rule.topk, device=CUDA), torch.ones(tokens, rule.shared, device=CUDA)], 1)
    return RouterOutput(weights, torch.cat([ids, shared], 1).contiguous())


def random_weights(shape: Shape) -> ExpertWeights:
    """Full size, for times only: codes of random bits without the two that are no numbers."""
    n, h, i = shape.stack, shape.hidden, shape.inner

    def one(*size: int) -> Tensor:
        if not shape.fp8:
            return torch.randn(*size, device=CUDA, dtype=torch.bfloat16).mul_(0.02)
        bits = torch.randint(0, 256, size, device=CUDA, dtype=torch.uint8)
        return bits.bitwise_and_(0xBF).view(torch.float8_e4m3fn)  # exponents below 8: magnitudes below 2

    if not shape.fp8:
        return ExpertWeights(one(n, 2 * i, h), one(n, h, i))
    s13 = torch.full((n, 2 * i // 128, h // 128), 0.02, device=CUDA)
    return ExpertWeights(one(n, 2 * i, h), one(n, h, i), s13, torch.full((n, h // 128, i // 128), 0.02, device=CUDA))


def drawn_weights(n: int, hidden: int, inner: int, fp8: bool) -> tuple[ExpertWeights, Tensor, Tensor]:
    """Few experts, with their float32 values for the reference."""
    w13 = torch.randn(n, 2 * inner, hidden, device=CUDA) * hidden**-0.5
    w2 = torch.randn(n, hidden, inner, device=CUDA) * inner**-0.5
    if not fp8:
        given = ExpertWeights(w13.bfloat16(), w2.bfloat16())
        return given, given.w13_NIH.float(), given.w2_NHI.float()
    block = (128, 128)
    q13, q2 = [quantize_blocks(w, block, False) for w in w13], [quantize_blocks(w, block, False) for w in w2]
    given = ExpertWeights(*(torch.stack([pair[part] for pair in each]) for part in (0, 1) for each in (q13, q2)))
    exact = [torch.stack([dequantize(q, s, block, torch.float32) for q, s in each]) for each in (q13, q2)]
    return given, exact[0], exact[1]


def seen_as(x: Tensor, fp8: bool) -> Tensor:
    """float64 of what a product sees. Rounded to FP8 on the CPU: on a GPU torch multiplies by 1 / 448, and values
    half-way between two codes, of which bf16 has many, then go the other way.
    """
    return rounded(x.cpu()).to(x.device).double() if fp8 else x.double()


def expected(out: Tensor, x: Tensor, routed: RouterOutput, w13: Tensor, w2: Tensor, fp8: bool) -> Tensor:
    """float64, expert by expert."""
    total, seen = out.double(), seen_as(x, fp8)
    for expert in range(w13.shape[0]):
        token, k = (routed.ids_TK == expert).nonzero(as_tuple=True)
        gate, up = (seen[token] @ w13[expert].double().t()).chunk(2, 1)
        inner = (F.silu(gate) * up).bfloat16()
        y = seen_as(inner, fp8) @ w2[expert].double().t()
        total.index_add_(0, token, y * routed.weights_TK[token, k].double()[:, None])
    return total


def error(got: Tensor, exact: Tensor) -> float:
    """max |difference| / max |exact|; infinite where it is not a number."""
    difference = (got.double() - exact.double()).abs().nan_to_num(nan=torch.inf)
    return float(difference.max() / exact.double().abs().max())


def check_experts(
    shape: Shape, tokens: int, run: Callable[..., None], tolerance: float = 1e-2, **more: Any
) -> dict[str, Any]:
    rule = RouterConfig(12, shape.rule.topk, 1.0, 1, 1, "greedy", False, shape.rule.shared)
    weights, w13, w2 = drawn_weights(12 + rule.shared, shape.hidden, shape.inner, shape.fp8)
    x, out = (torch.randn(tokens, shape.hidden, device=CUDA).bfloat16() for _ in range(2))
    routed = draw_ids(tokens, rule)
    if tokens > 1:  # one token of padding
        routed.ids_TK[tokens // 2], routed.weights_TK[tokens // 2] = 12 + rule.shared, 0.0
    exact = expected(out, x, routed, w13, w2, shape.fp8)
    again = out.clone()
    for result in (out, again):
        run(result, x, routed, weights, **more)
    found = error(out, exact)
    if found > tolerance or not torch.equal(out, again):
        raise AssertionError(f"error {found}, repeatable: {torch.equal(out, again)}")
    return {"error": found}


def check_router(shape: Shape, tokens: int, dtype: torch.dtype, deterministic: bool) -> dict[str, Any]:
    rule = shape.rule
    x = torch.randn(tokens, shape.hidden, device=CUDA).bfloat16()
    weight = (torch.randn(rule.experts, shape.hidden, device=CUDA) * shape.hidden**-0.5).to(dtype)
    bias = torch.randn(rule.experts, device=CUDA) * 0.1
    real = torch.rand(tokens, device=CUDA) > 0.1
    got = router.route(x, weight, bias, rule, real, shape.hidden % 128 == 0, deterministic)
    logits = x.double() @ weight.double().t()
    weights, ids = router_ref.choose_experts(logits.float(), bias if rule.is_sigmoid else None, rule)
    wide = rule.experts + rule.shared + 1
    want = torch.zeros(tokens, wide, device=CUDA).scatter_(1, ids, weights)
    want[:, rule.experts : rule.experts + rule.shared] = 1.0
    want[~real] = 0.0
    dense = torch.zeros(tokens, wide, device=CUDA).scatter_(1, got.ids_TK.long(), got.weights_TK)
    # a near tie may go either way: count tokens that chose otherwise, and compare the rest
    same = ((dense > 0) == (want > 0)).all(1)
    assert got.codes_TH is not None and got.scales_TG is not None
    codes = error(got.codes_TH.float() * got.scales_TG.repeat_interleave(128, 1), seen_as(x, True))
    row = {
        "error": error(dense[same], want[same]) if bool(real.any()) else 0.0,
        "otherwise": int((~same).sum()),
        "codes": codes,
    }
    padding = bool((got.ids_TK[~real] == wide - 1).all())
    if row["error"] > 1e-5 or row["otherwise"] > tokens // 500 or codes > 1e-6 or not padding:
        raise AssertionError(f"{row}, padding: {padding}")
    return row


def check_small() -> dict[str, Any]:
    x = torch.randn(37, 1408, device=CUDA).bfloat16()
    codes, scales = quantize(x)
    first = error(codes.double() * scales.double().repeat_interleave(128, 1), seen_as(x, True))
    both = torch.randn(37, 2816, device=CUDA).bfloat16()
    gate, up = both.double().chunk(2, 1)
    exact = F.silu(gate) * up
    second = error(silu_mul(both), exact)
    codes, scales = silu_mul_quantize(both)
    third = error(codes.double() * scales.double().repeat_interleave(128, 1), seen_as(exact.bfloat16(), True))
    if first > 1e-6 or second > 4e-3 or third > 4e-2:
        raise AssertionError((first, second, third))
    return {"quantize": first, "silu_mul": second, "silu_mul_quantize": third}


def check_batch_invariance(shape: Shape) -> dict[str, Any]:
    """Deterministic mode: a token alone, among 3 and among 600 gives the same bits; and so does its routing."""
    weights, _, _ = drawn_weights(16, shape.hidden, shape.inner, shape.fp8)
    rule = RouterConfig(16 - shape.rule.shared, 4, 1.0, 1, 1, "greedy", False, shape.rule.shared)
    gate = torch.randn(rule.experts, shape.hidden, device=CUDA) * shape.hidden**-0.5
    x, out = (torch.randn(600, shape.hidden, device=CUDA).bfloat16() for _ in range(2))
    results = []
    for tokens in (1, 3, 600):
        part = out[:tokens].clone()
        routed = router.route(x[:tokens], gate, None, rule, None, shape.fp8, True)
        experts.run_experts(part, x[:tokens], routed, weights, deterministic=True)
        results.append((routed.weights_TK[:1], part[:1]))
    same = all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))
    if not same:
        raise AssertionError("a token's result depends on the others")
    return {"bitwise": same}


def checks(log: Log) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN: what was never written shows
    log.attempt("check quantize, silu_mul", check_small)
    for shape in (LITE, SLIM):
        for tokens in (1, 2, 5, 33, 128, 700):
            log.attempt(f"check {shape.name} experts T={tokens}", check_experts, shape, tokens, experts.run_experts)
            log.attempt(f"check {shape.name} router T={tokens}", check_router, shape, tokens, torch.float32, False)
        log.attempt(
            f"check {shape.name} experts deterministic",
            check_experts,
            shape,
            3,
            experts.run_experts,
            deterministic=True,
        )
        log.attempt(f"check {shape.name} router bf16", check_router, shape, 1000, torch.bfloat16, False)
        log.attempt(f"check {shape.name} router deterministic", check_router, shape, 9, torch.float32, True)
        log.attempt(f"check {shape.name} batch invariance", check_batch_invariance, shape)
    if deep_gemm.available():
        # bf16 between the product and silu moves one in twenty codes
        log.attempt("check DeepGEMM", check_experts, SLIM, 700, ext.run_experts, 4e-2)
    torch.use_deterministic_algorithms(False)


def floor(shape: Shape, tokens: int, covered: float, top: dict[str, float]) -> tuple[float, int]:
    """Seconds and bytes of an ideal layer."""
    moved = int(covered * shape.expert_bytes) + 6 * tokens * shape.hidden
    flops = 6 * tokens * (shape.rule.topk + shape.rule.shared) * shape.hidden * shape.inner
    return max(moved / top["read"], flops / top["fp8" if shape.fp8 else "bf16"]), moved


def time_experts(
    shape: Shape, weights: ExpertWeights, tokens: int, top: dict[str, float], run: Callable[..., None], **more: Any
) -> dict[str, Any]:
    copies = COPIES if tokens < 1024 else 2
    routed = [draw_ids(tokens, shape.rule) for _ in range(copies)]
    x = torch.randn(tokens, shape.hidden, device=CUDA).bfloat16()
    if shape.fp8:
        routed = [RouterOutput(each.weights_TK, each.ids_TK, *quantize(x)) for each in routed]
    out = torch.zeros_like(x)
    covered = (
        sum(float(experts.coverage(each.ids_TK, shape.rule.experts)) for each in routed) / copies + shape.rule.shared
    )
    took = timed([lambda each=each: run(out, x, each, weights, **more) for each in routed])
    ideal, moved = floor(shape, tokens, covered, top)
    flops = 6 * tokens * (shape.rule.topk + shape.rule.shared) * shape.hidden * shape.inner
    return {
        "us": took * 1e6, "floor_us": ideal * 1e6, "share": ideal / took, "experts": covered, "GB/s": moved / took / 1e9,
        "TFLOP/s": flops / took / 1e12,
    }  # fmt: skip


def time_router(shape: Shape, tokens: int, top: dict[str, float], dtype: torch.dtype) -> dict[str, Any]:
    rule = shape.rule
    x = torch.randn(tokens, shape.hidden, device=CUDA).bfloat16()
    gates = [torch.randn(rule.experts, shape.hidden, device=CUDA).mul_(0.02).to(dtype) for _ in range(COPIES)]
    bias, real = torch.zeros(rule.experts, device=CUDA), torch.ones(tokens, device=CUDA, dtype=torch.bool)
    took = timed([lambda gate=gate: router.route(x, gate, bias, rule, real, shape.fp8) for gate in gates])
    moved = gates[0].numel() * gates[0].itemsize + tokens * shape.hidden * (3 if shape.fp8 else 2)
    return {"us": took * 1e6, "floor_us": moved / top["read"] * 1e6}


def time_block(shape: Shape, weights: ExpertWeights, tokens: int, top: dict[str, float]) -> dict[str, Any]:
    """Router and experts, as a layer runs them: what lies between the kernels counts."""
    rule, copies = shape.rule, COPIES if tokens < 1024 else 2
    gates = [torch.randn(rule.experts, shape.hidden, device=CUDA).mul_(0.02).bfloat16() for _ in range(copies)]
    x = torch.randn(tokens, shape.hidden, device=CUDA).bfloat16()
    bias, real, out = (
        torch.zeros(rule.experts, device=CUDA),
        torch.ones(tokens, device=CUDA, dtype=torch.bool),
        torch.zeros_like(x),
    )

    def run(gate: Tensor) -> RouterOutput:
        routed = router.route(x, gate, bias, rule, real, shape.fp8)
        experts.run_experts(out, x, routed, weights)
        return routed

    ids = [run(gate).ids_TK for gate in gates]
    covered = sum(float(experts.coverage(each, rule.experts)) for each in ids) / copies + rule.shared
    took = timed([lambda gate=gate: run(gate) for gate in gates])
    ideal, _ = floor(shape, tokens, covered, top)
    return {"us": took * 1e6, "floor_us": ideal * 1e6, "share": ideal / took, "experts": covered}


def time_stages(shape: Shape, weights: ExpertWeights, tokens: int) -> dict[str, Any]:
    """What DeepGEMM's path consists of, each alone, in µs."""
    routed, x = draw_ids(tokens, shape.rule), torch.randn(tokens, shape.hidden, device=CUDA).bfloat16()
    codes, scales = quantize(x)
    by = moe_align.sort(routed.ids_TK, shape.stack, 128, True)
    a, a_scales = moe_align.gather(codes, scales, by, routed.ids_TK, shape.stack)
    ends = by.end_N[: shape.stack]
    gate_up = torch.empty(a.shape[0], 2 * shape.inner, device=CUDA, dtype=torch.bfloat16)
    y = torch.empty(a.shape[0], shape.hidden, device=CUDA, dtype=torch.bfloat16)
    multiply = deep_gemm.library().m_grouped_fp8_gemm_nt_contiguous
    inner = silu_mul_quantize(gate_up, by.tiles)
    stages = {
        "gather": lambda: moe_align.gather(codes, scales, by, routed.ids_TK, shape.stack),
        "up": lambda: multiply((a, a_scales), (weights.w13_NIH, weights.s13), gate_up, ends, **ext.LAYOUT),
        "silu": lambda: silu_mul_quantize(gate_up, by.tiles),
        "down": lambda: multiply(inner, (weights.w2_NHI, weights.s2), y, ends, **ext.LAYOUT),
        "combine": lambda: moe_align.combine(x, y, by.position_P, routed.ids_TK, routed.weights_TK, shape.stack),
    }
    return {"tiles": int(by.tiles)} | {name: timed([run]) * 1e6 for name, run in stages.items()}


def time_sort(shape: Shape, tokens: int) -> dict[str, Any]:
    routed = [draw_ids(tokens, shape.rule) for _ in range(COPIES)]
    return {"us": timed([lambda each=each: moe_align.sort(each.ids_TK, shape.stack, 64) for each in routed]) * 1e6}


def variants(shape: Shape, tokens: int) -> Iterator[ExpertTiles]:
    """Other tiles: one side is varied at a time, the other stays as the table has it."""
    if experts.path(tokens, shape.fp8, False, not shape.fp8) == "pairs":
        base = experts.tabled("pairs", tokens, 1, 1, False)
        ups = [(16, 256, 5, 4), (8, 256, 6, 4), (16, 512, 4, 8), (32, 256, 4, 8), (8, 512, 4, 4), (32, 128, 5, 4)]
        downs = [(8, 128, 4, 8), (16, 128, 3, 8), (4, 256, 3, 8), (4, 128, 3, 4)]
        first = [ExpertTile(1, *each) for each in ups], [ExpertTile(1, *each) for each in downs]
    else:
        base = experts.tabled("sorted", tokens, shape.rule.topk + shape.rule.shared, shape.stack, shape.fp8)
        if shape.fp8:
            sizes = [(128, 128, 3, 4), (128, 128, 3, 8), (128, 128, 5, 4)]
        elif base.up.m == 128:
            sizes = [(128, 64, 3, 8), (256, 64, 4, 8), (128, 128, 2, 8), (64, 64, 3, 4)]
        else:
            sizes = [(32, 256, 3, 4), (128, 128, 3, 8), (64, 128, 4, 4)]
        first = [ExpertTile(base.up.m, *each) for each in sizes], [ExpertTile(base.up.m, *each) for each in sizes]
    for up in first[0]:
        if up.n <= 128:
            yield ExpertTiles(up, base.down)
    for down in first[1]:
        yield ExpertTiles(base.up, down)
    if base.up.m in (16, 32):
        yield ExpertTiles(
            ExpertTile(48 - base.up.m, base.up.n, base.up.k, 3, 4),
            ExpertTile(48 - base.up.m, base.down.n, base.down.k, 3, 4),
        )
    if base.up.m == 128:
        yield ExpertTiles(ExpertTile(64, 128, 64, 4, 4), ExpertTile(64, 256, 64, 4, 4))


def name_of(shape: ExpertTiles) -> str:
    return "up {m}x{n}x{k} s{stages} w{warps}".format(
        **asdict(shape.up)
    ) + ", down {m}x{n}x{k} s{stages} w{warps}".format(**asdict(shape.down))


def main() -> None:
    log = Log(float(sys.argv[1]) if len(sys.argv) > 1 else 90.0)
    top = ceilings()
    print({key: f"{value:.4g}" for key, value in top.items()}, torch.cuda.get_device_name(), flush=True)
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    with torch.inference_mode():
        checks(log)
        for shape in (LITE, SLIM):
            weights = random_weights(shape)
            for tokens in (1, 2, 8, 32, 128, 1024, 4096, 8192):
                label = f"{shape.name} T={tokens}"
                log.attempt(f"{label} experts", time_experts, shape, weights, tokens, top, experts.run_experts)
                for dtype in (torch.float32, torch.bfloat16):
                    log.attempt(f"{label} router {dtype}", time_router, shape, tokens, top, dtype)
                log.attempt(f"{label} sort", time_sort, shape, tokens)
                log.attempt(f"{label} router and experts", time_block, shape, weights, tokens, top)
                if shape.fp8 and tokens >= 1024 and deep_gemm.available():
                    log.attempt(f"{label} DeepGEMM stages", time_stages, shape, weights, tokens)
                    log.attempt(f"{label} DeepGEMM", time_experts, shape, weights, tokens, top, ext.run_experts)
            for tokens in (1, 2, 3, 4, 6):
                for by in ("direct", "sorted") if shape.fp8 else ("pairs", "direct", "sorted"):
                    plan = by, experts.tabled(by, tokens, shape.rule.topk + shape.rule.shared, shape.stack, shape.fp8)
                    label = f"{shape.name} T={tokens} {by}"
                    log.attempt(label, time_experts, shape, weights, tokens, top, experts.run_experts, plan=plan)
            share = log.left / (2 if shape is LITE else 1)
            until = log.left - share
            for tokens in (1, 32, 128, 8192, 8, 1024):
                path = experts.path(tokens, shape.fp8, False, not shape.fp8)
                for given in variants(shape, tokens):
                    if log.left > until:
                        label = f"{shape.name} T={tokens} {name_of(given)}"
                        log.attempt(
                            label, time_experts, shape, weights, tokens, top, experts.run_experts, plan=(path, given)
                        )
            del weights
            torch.cuda.empty_cache()
    record = {
        "command": "python benchmarks/gpu/moe.py", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "ceilings": top, "failed": log.failed, "rows": log.rows,
    }  # fmt: skip
    Path(os.environ.get("OUT", "."), "moe.json").write_text(json.dumps(record, indent=1))
    print(f"failed: {log.failed}")


if __name__ == "__main__":
    main()
