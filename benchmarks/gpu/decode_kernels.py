"""Kernels of a decode step, each alone, over tiles: `python benchmarks/gpu/decode_kernels.py [s] [linear|experts|head
...]`.

Writes $OUT/decode_kernels.json (OUT: the current folder if unset). Times: CUDA-graph replays of calls in a row, each
with weights of its own (of as many layers as exceed L2 several times), so that weights come from memory and what lies
between two kernels counts: a kernel that has its weights under way before its predecessor ends shows it here, as it
does in a model. A norm stands before each product that has one in a model. Floor: the weights read once at the read
bandwidth of the same run. Every result is compared with float64.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Callable

import torch
import torch.nn.functional as F
import triton
from moe import COPIES, CUDA, LITE, SLIM, Log, Shape, ceilings, error, random_weights, timed
from torch import Tensor

from thalweg.kernels.experts import triton as experts
from thalweg.kernels.experts.triton import ExpertTile, ExpertTiles
from thalweg.kernels.fp8_block.ref import dequantize
from thalweg.kernels.gemm import triton as gemm
from thalweg.kernels.gemm.epilogue import Epilogue
from thalweg.kernels.gemm.triton import GemvTile
from thalweg.kernels.norm.triton import LazyNorm, rms_norm
from thalweg.kernels.quantize.triton import quantize
from thalweg.kernels.router import triton as router

EPS = 1e-6
RESIDENT = 300e6  # bytes of weights in a graph: several times L2


@dataclass(frozen=True)
class Product:
    """A product of a layer: n × k weights; after a norm, or added to the residual."""

    name: str
    n: int
    k: int
    fp8: bool = False
    norm: bool = False
    residual: bool = False

    @property
    def bytes(self) -> int:
        return self.n * self.k * (1 if self.fp8 else 2)


LINEAR = (
    Product("v2-lite down", 3648, 2048, norm=True),
    Product("v2-lite out", 2048, 2048, residual=True),
    Product("v3 down", 2112, 7168, fp8=True, norm=True),
    Product("v3 up", 24576, 1536, fp8=True, norm=True),
    Product("v3 out", 7168, 16384, fp8=True, residual=True),
    Product("v3 dense gate_up", 36864, 7168, fp8=True, norm=True),
    Product("v3 dense down", 7168, 18432, fp8=True, residual=True),
)
HEADS = (Product("v2-lite head", 102400, 2048), Product("v3 head", 129280, 7168))


class SampledTokens:
    """Weights for as many calls as exceed L2, and their input."""

    def __init__(self, shape: Product, rows: int) -> None:
        copies = max(3, min(COPIES * 3, int(RESIDENT / shape.bytes)))
        self.shape, self.rows = shape, rows
        self.x = torch.randn(rows, shape.k, device=CUDA).bfloat16()
        self.norm = torch.rand(shape.k, device=CUDA) + 0.5
        self.y = torch.zeros(rows, shape.n, device=CUDA, dtype=torch.bfloat16)
        self.epilogue = Epilogue(residual_MN=self.y if shape.residual else None)
        if shape.fp8:
            bits = (torch.randint(0, 256, (shape.n, shape.k), device=CUDA, dtype=torch.uint8) for _ in range(copies))
            self.weights = [each.bitwise_and_(0xBF).view(torch.float8_e4m3fn) for each in bits]
        else:
            self.weights = [
                torch.randn(shape.n, shape.k, device=CUDA, dtype=torch.bfloat16).mul_(0.02) for _ in range(copies)
            ]
        scale = torch.rand(-(-shape.n // 128), shape.k // 128, device=CUDA) * 0.02
        self.scale = scale if shape.fp8 else None

    def library(self, w: Tensor) -> Tensor:
        """Norm, then the library's product."""
        x = rms_norm(self.x, self.norm, EPS) if self.shape.norm else self.x
        if self.scale is not None:
            y = torch.empty_like(self.y)
            importlib.import_module("deep_gemm").fp8_gemm_nt(quantize(x), (w, self.scale), y)
            return self.y.add_(y) if self.shape.residual else y
        return torch.addmm(self.y, x, w.t(), out=self.y) if self.shape.residual else F.linear(x, w)

    def chosen(self, w: Tensor) -> Tensor:
        """What the tables choose, norm and all."""
        x: Tensor | LazyNorm = self.x
        if self.shape.norm:
            x = LazyNorm(self.x, self.norm, EPS) if self.rows <= gemm.NORMED else rms_norm(self.x, self.norm, EPS)
        if self.scale is not None:
            return gemm.linear_fp8(x, w, self.scale, self.epilogue)
        return gemm.linear(x, w, self.epilogue)

    def gemv(self, w: Tensor, tile: GemvTile, fused: bool) -> Tensor:
        x: Tensor | LazyNorm = self.x
        if self.shape.norm:
            x = LazyNorm(self.x, self.norm, EPS) if fused else rms_norm(self.x, self.norm, EPS)
        return gemm.gemv(x, w, tile, self.scale, self.epilogue)

    def exact(self, w: Tensor) -> Tensor:
        """float64."""
        x = self.x.double()
        if self.shape.norm:
            x = x * torch.rsqrt((x * x).mean(1, keepdim=True) + EPS) * self.norm
        wide = w.double() if self.scale is None else dequantize(w, self.scale, (128, 128), torch.float32).double()
        return x @ wide.t() + (self.y.double() if self.shape.residual else 0.0)


def gemv_tiles(shape: Product, rows: int) -> list[GemvTile]:
    """Those worth trying."""
    m = (8,) if rows <= 8 else (16,) if rows <= 16 else (32,)
    if rows == 1:
        m, steps = (1, 8), shape.k // 1024
        alone = [
            (4, 8, 128, steps, 1, 8),
            (8, 8, 128, steps, 1, 8),
            (8, 8, 128, steps // 2, 3, 8),
            (4, 4, 256, steps, 1, 4),
            (8, 8, 128, 2, 3, 8),
        ]
        some = [GemvTile(1, *each) for each in alone if shape.k % 1024 == 0 and steps <= 16]
        if shape.k % 1024:
            steps = shape.k // 512
            some = [GemvTile(1, n, 4, 128, steps, 1, 4) for n in (8, 16, 32) if steps <= 8]
    else:
        some = []
    if not shape.fp8:
        forms = [
            (16, 4, 256, 2, 1, 4),
            (16, 4, 256, 1, 2, 4),
            (16, 4, 128, 2, 3, 4),
            (32, 8, 128, 1, 3, 8),
            (32, 4, 128, 1, 3, 4),
        ]
    elif shape.k == 1536:
        forms = [(16, 4, 128, 1, 3, 4), (32, 4, 128, 1, 3, 4), (64, 4, 128, 1, 3, 4)]
    else:
        forms = [
            (16, 8, 128, 1, 4, 8),
            (16, 8, 128, 0, 5, 8),
            (32, 4, 128, 1, 4, 4),
            (16, 4, 128, 1, 3, 4),
            (32, 4, 128, 1, 3, 4),
        ]
    some += [GemvTile(m_, *form) for m_, form in product(m, forms)]
    return [
        each
        for each in some
        if shape.k % (each.parts * each.columns) == 0
        and not (shape.fp8 and each.columns > 128)
        and each.ahead <= shape.k // (each.parts * each.columns)
    ]


def best(log: Log, top: dict[str, float], shape: Product, rows: int, compare: int = 4) -> dict[str, Any]:
    """The fastest tiles, with the norm fused and before, beside the library's and the other kernel."""
    drawn = SampledTokens(shape, rows)
    calls: dict[str, Callable[[Tensor], object]] = {"library": drawn.library, "chosen": drawn.chosen}
    for tile in gemv_tiles(shape, rows):
        name = "x".join(str(getattr(tile, field)) for field in GemvTile.__dataclass_fields__)
        for fused in (True, False) if shape.norm and rows <= 16 else (False,):
            calls[f"{'fused' if fused else 'gemv'} {name}"] = partial(drawn.gemv, tile=tile, fused=fused)
    took, wrong = {}, {}
    with ThreadPoolExecutor(16) as pool:  # compiles
        started = {name: pool.submit(torch.inference_mode()(call), drawn.weights[0]) for name, call in calls.items()}
    for name, call in calls.items():
        if (failure := started[name].exception()) is not None:
            wrong[name] = str(failure).splitlines()[-1][:120]
            continue
        drawn.y.zero_()
        exact = drawn.exact(drawn.weights[0])
        found = error(call(drawn.weights[0]), exact)  # type: ignore[arg-type]
        if found > (6e-2 if shape.fp8 and name == "library" else 1e-2):
            wrong[name] = f"error {found:.3g}"
        took[name] = timed([partial(call, w) for w in drawn.weights], 0.03) * 1e6
    order = sorted(took, key=lambda name: took[name])
    floor = shape.bytes / top["read"] * 1e6
    shown = [f"{name} {took[name]:.2f}" for name in order[:compare]]
    print(
        f"{shape.name} M={rows} floor {floor:.2f} us: {', '.join(shown)} | chosen {took.get('chosen', 0):.2f} library"
        f" {took.get('library', 0):.2f}",
        flush=True,
    )
    if wrong:
        print(f"  WRONG {wrong}", flush=True)
        log.failed.append(f"{shape.name} {rows}")
    return {
        "floor_us": floor, "best": order[0], "us": took[order[0]], "share": floor / took[order[0]],
        "GB/s": shape.bytes / took[order[0]] / 1e3, "all": took, "wrong": wrong,
    }  # fmt: skip


def products(log: Log, top: dict[str, float], shapes: tuple[Product, ...], rows: tuple[int, ...]) -> None:
    for shape, count in product(shapes, rows):
        attempt(log, f"{shape.name} M={count}", partial(best, log, top, shape, count))


def attempt(log: Log, name: str, run: Callable[[], dict[str, Any]]) -> None:
    """As `Log.attempt`, without its line, while time is left."""
    if log.left < 0:
        return
    try:
        log.rows.append({"case": name} | run())
    except Exception as failure:  # noqa: BLE001 - whatever a kernel or its compiler throws is a result here
        log.failed.append(name)
        print(f"{name}: FAILED {failure!r}"[:600], flush=True)


def expert_tiles(shape: Shape, tokens: int) -> list[tuple[str, ExpertTiles]]:
    """(path, tiles) to try for these tokens."""
    if not shape.fp8:
        base = experts.tabled("pairs", tokens, 1, 1, False)
        ups = [
            (16, 2048, 1, 8),
            (8, 2048, 1, 8),
            (8, 2048, 1, 4),
            (4, 2048, 1, 4),
            (16, 256, 3, 4),
            (16, 512, 3, 8),
            (16, 256, 5, 4),
            (8, 256, 6, 4),
        ]
        downs = [
            (8, 128, 3, 8, 1),
            (8, 128, 3, 8, 3),
            (8, 128, 2, 8, 2),
            (8, 128, 4, 8, 2),
            (16, 128, 3, 8, 1),
            (16, 128, 3, 8, 2),
            (4, 128, 1, 4, 11),
        ]
        return [
            ("pairs", base),
            *(("pairs", ExpertTiles(ExpertTile(1, *each), base.down, base.ahead)) for each in ups),
            *(("pairs", ExpertTiles(base.up, ExpertTile(1, *each[:4]), each[4])) for each in downs),
        ]
    ups = [(16, 128, 128, 3, 4), (16, 128, 128, 4, 4)]
    downs = [(16, 128, 128, 3, 4), (16, 64, 128, 6, 4)]
    return [("direct", ExpertTiles(ExpertTile(*up), ExpertTile(*down))) for up in ups for down in downs]


def moe_layer(log: Log, top: dict[str, float], shape: Shape, tokens: int) -> None:
    """Norm, router and experts of a layer, over tiles of the experts."""
    rule, weights = shape.rule, random_weights(shape)
    gates = [torch.randn(rule.experts, shape.hidden, device=CUDA).mul_(0.02).bfloat16() for _ in range(COPIES)]
    x, norm = torch.randn(tokens, shape.hidden, device=CUDA).bfloat16(), torch.ones(shape.hidden, device=CUDA)
    bias, out = torch.zeros(rule.experts, device=CUDA), torch.zeros_like(x)

    def run(gate: Tensor, by: str, given: ExpertTiles) -> Tensor:
        normed = LazyNorm(x, norm, EPS) if tokens <= gemm.NORMED else rms_norm(x, norm, EPS)
        routed = router.route(normed, gate, bias, rule, None, shape.fp8)
        experts.run_experts(out, normed, routed, weights, plan=(by, given))
        return routed.ids_TK

    forms = expert_tiles(shape, tokens)
    ids = [run(gate, *forms[0]) for gate in gates]
    covered = sum(float(experts.coverage(each, rule.experts)) for each in ids) / COPIES + rule.shared
    floor = covered * shape.expert_bytes / top["read"] * 1e6
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda form: run(gates[0], *form), forms))
    for by, given in forms:
        name = f"{shape.name} T={tokens} {by} up {given.up} down {given.down} ahead {given.ahead}".replace("Tile", "")

        def one(by: str = by, given: ExpertTiles = given) -> dict[str, Any]:
            took = timed([lambda gate=gate: run(gate, by, given) for gate in gates], 0.05) * 1e6
            return {"us": took, "floor_us": floor, "share": floor / took, "experts": covered}

        log.attempt(name, one)


def main() -> None:
    log = Log(float(sys.argv[1]) if len(sys.argv) > 1 else 90.0)
    parts = sys.argv[2:] or ["linear", "experts", "head"]
    top = ceilings()
    print({key: f"{value:.4g}" for key, value in top.items()}, torch.cuda.get_device_name(), flush=True)
    with torch.inference_mode():
        if "linear" in parts:
            products(log, top, LINEAR, (1, 16))
        if "experts" in parts:
            for shape in (LITE, SLIM):
                moe_layer(log, top, shape, 1)
                torch.cuda.empty_cache()
        if "head" in parts:
            products(log, top, HEADS, (1, 8, 16))
    record = {
        "command": "python benchmarks/gpu/decode_kernels.py", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "ceilings": top, "failed": log.failed, "rows": log.rows,
    }  # fmt: skip
    Path(os.environ.get("OUT", "."), "decode_kernels.json").write_text(json.dumps(record, indent=1))
    print(f"failed: {log.failed}")


if __name__ == "__main__":
    main()
