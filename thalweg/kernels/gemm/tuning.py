"""What `thalweg tune` tries of few-row products: their tiles, for one weight and each number of rows at which the table
has another tile; and up to how many rows the own kernel is faster than DeepGEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import Inputs, draw_tensor
from thalweg.kernels.fp8_block.ref import dequantize
from thalweg.kernels.gemm import fp8
from thalweg.kernels.gemm import triton as gemm
from thalweg.kernels.gemm.triton import GemvTile
from thalweg.kernels.norm.triton import LazyNorm
from thalweg.kernels.search import Pair, TuningSearch

EPS = 1e-6
ROWS = (1, 8, 16, 32)  # the most that each of the tables' tiles serves
LADDER = (1, 2, 4, 8, 12, 16, 24, 32)  # of a threshold
WIDTHS, PARTS, COLUMNS = (4, 8, 16, 32, 64), (1, 4, 8), (128, 256)
AHEAD, STAGES = (0, 1, 2, 4, 8), (1, 3, 4, 5)
REGISTERS = 1 << 15  # bytes of weights that a program holds at once at most: more spills


def searches(n: int, k: int, itemsize: int) -> Iterator[TuningSearch]:
    """Of a weight [n, k] of bf16 (itemsize 2) or e4m3 (1); after a norm too, where that is computed by the product."""
    seen = set()
    for rows in ROWS:
        for normed in (False, True) if rows <= gemm.NORMED and n < gemm.MANY else (False,):
            tile = gemm.tabled(rows, n, k, itemsize, normed)
            if tile is not None and (tile, normed) not in seen:
                seen.add((tile, normed))
                yield _search(rows, n, k, itemsize, normed, tile)


def threshold(n: int, k: int) -> TuningSearch:
    """Of "triton+deep_gemm", for a weight [n, k] of e4m3. Each candidate computes products of every number of rows in
    LADDER, one behind another: the sum is least where every one has the faster of both.
    """

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        scale = torch.rand(-(-n // 128), k // 128, generator=generator, device=generator.device) * 0.02
        given: Inputs = {f"x{rows}": draw_tensor(generator, rows, k) for rows in LADDER}
        return given | {"w": draw_tensor(generator, n, k, dtype=torch.float8_e4m3fn), "scale": scale}

    def run(few: int, given: Inputs) -> tuple[Tensor, ...]:
        by = (fp8.PRODUCTS["triton" if rows <= few else "deep_gemm"] for rows in LADDER)
        return tuple(
            product(given[f"x{rows}"], given["w"], given["scale"]) for rows, product in zip(LADDER, by, strict=True)
        )

    def reference(given: Inputs) -> tuple[Tensor, ...]:
        wide = dequantize(given["w"], given["scale"], fp8.BLOCK, torch.float32)
        return tuple(given[f"x{rows}"].float() @ wide.t() for rows in LADDER)

    label = f"rows up to which the own kernel computes, {n} x {k}, e4m3"
    return TuningSearch(
        "fp8_rows", (n, k), label, fp8.FEW, (0, *LADDER), draw, run, reference, 4e-2, n * k * len(LADDER), alike=True
    )


def candidates(default: GemvTile, rows: int, k: int, itemsize: int) -> Iterator[GemvTile]:
    """The table's first, then others that a program can hold, the nearest to it first."""
    yield default
    some = []
    for m in {default.m, 8} if rows == 1 else {default.m}:
        for n, parts, columns, ahead, stages in product(WIDTHS, PARTS, COLUMNS, AHEAD, STAGES):
            steps = k // (parts * columns)
            whole = {min(ahead, steps), steps} if m == 1 and steps <= 16 else {min(ahead, steps)}
            if k % (parts * columns) or (itemsize == 1 and columns > 128) or (m > 1 and parts * n < 16):
                continue
            for under_way in whole:
                held = n * parts * columns * itemsize * max(under_way, 1)
                if held <= REGISTERS and not (under_way == steps and stages > 1):
                    some.append(GemvTile(m, n, parts, columns, under_way, stages, max(4, parts)))
    yield from sorted({one for one in some if one != default}, key=lambda one: _distance(one, default))


def _distance(one: GemvTile, other: GemvTile) -> tuple[float, str]:
    """How many doublings lie between two tiles."""
    pairs = ((one.n, other.n), (one.parts, other.parts), (one.columns, other.columns), (one.stages, other.stages))
    doubled = sum(abs(a.bit_length() - b.bit_length()) for a, b in (*pairs, (one.ahead + 1, other.ahead + 1)))
    return doubled + (one.m != other.m), repr(one)


def _search(rows: int, n: int, k: int, itemsize: int, normed: bool, tile: GemvTile) -> TuningSearch:
    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        device = generator.device
        given = {
            "x": draw_tensor(generator, rows, k),
            "norm": torch.rand(k, generator=generator, device=device) + 0.5,
            "scale": None,
        }
        if itemsize == 1:
            scale = torch.rand(-(-n // 128), k // 128, generator=generator, device=device) * 0.02
            return given | {"w": draw_tensor(generator, n, k, dtype=torch.float8_e4m3fn), "scale": scale}
        return given | {"w": draw_tensor(generator, n, k).mul_(k**-0.5)}

    def run(tile: GemvTile, given: Inputs) -> tuple[Tensor, ...]:
        x = LazyNorm(given["x"], given["norm"], EPS) if normed else given["x"]
        return (gemm.gemv(x, given["w"], tile, given["scale"]),)

    def reference(given: Inputs) -> tuple[Tensor, ...]:
        x, w = given["x"].double(), given["w"]
        if normed:
            x = x * torch.rsqrt((x * x).mean(1, keepdim=True) + EPS) * given["norm"]
        wide = w.double() if itemsize == 2 else dequantize(w, given["scale"], (128, 128), torch.float32).double()
        return (x @ wide.t(),)

    def uses(tile: GemvTile, given: Inputs) -> list[Pair]:
        """With a residual; and, in bf16, as the first half of a SwiGLU, which pairs rows of the weight in another
        way.
        """
        x = LazyNorm(given["x"], given["norm"], EPS) if normed else given["x"]
        (whole,) = reference(given)
        pairs: list[Pair] = [
            (lambda: gemm.gemv(x, given["w"], tile, given["scale"], None, whole.bfloat16()), lambda: 2 * whole),
        ]
        if itemsize == 2 and n % 2 == 0:
            gate, up = whole.chunk(2, 1)
            pairs.append((lambda: gemm.gemv(x, given["w"], tile, swiglu=True), lambda: F.silu(gate) * up))
        return pairs

    key, label = (
        (n, k, itemsize, int(normed)),
        f"{rows} x {n} x {k}, {'bf16' if itemsize == 2 else 'e4m3'}{', normed' * normed}",
    )
    found = tuple(candidates(tile, rows, k, itemsize))
    return TuningSearch("gemv", key, label, tile, found, draw, run, reference, 1e-2, n * k * itemsize, uses=uses)
