"""The tiles that `thalweg tune` tries for one weight, at each number of rows where the table has another tile; and up
to how many rows the own kernel is faster than DeepGEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import Inputs, draw_tensor, fp8_weight
from thalweg.kernels.fp8_block.ref import dequantize
from thalweg.kernels.gemm import fp8, ref
from thalweg.kernels.gemm import triton as gemm
from thalweg.kernels.gemm.epilogue import Epilogue
from thalweg.kernels.gemm.triton import GemvTile
from thalweg.kernels.norm.triton import LazyNorm
from thalweg.kernels.search import Pair, TuningSearch, nearest_first

EPS = 1e-6
ROWS = (1, 8, 16, 32)  # the most that each of the table's tiles serves
LADDER = (1, 2, 4, 8, 12, 16, 24, 32)  # of a threshold
WIDTHS, PARTS, COLUMNS = (4, 8, 16, 32, 64), (1, 4, 8), (128, 256)
AHEAD, STAGES = (0, 1, 2, 4, 8), (1, 3, 4, 5)
REGISTERS = 1 << 15  # bytes of weights that a program holds at once at most: more spills


def searches(n: int, k: int, itemsize: int) -> Iterator[TuningSearch]:
    """For a weight [n, k] of bf16 (itemsize 2) or e4m3 (1); after a norm too, where the product computes it."""
    seen = set()
    for rows in ROWS:
        for normed in (False, True) if rows <= gemm.NORMED and n < gemm.MANY else (False,):
            tile = gemm.tabled(rows, n, k, itemsize, normed)
            if tile is not None and (tile, normed) not in seen:
                seen.add((tile, normed))
                yield _search(rows, n, k, itemsize, normed, tile)


def candidates(default: GemvTile, rows: int, k: int, itemsize: int) -> Iterator[GemvTile]:
    """The table's tile first, then others that a program can hold, the nearest first."""
    yield default
    tiles = []
    for m in {default.m, 8} if rows == 1 else {default.m}:
        for n, parts, columns, ahead, stages in product(WIDTHS, PARTS, COLUMNS, AHEAD, STAGES):
            steps = k // (parts * columns)
            if k % (parts * columns) or (itemsize == 1 and columns > 128) or (m > 1 and parts * n < 16):
                continue
            for under_way in {min(ahead, steps), steps if m == 1 and steps <= 16 else min(ahead, steps)}:
                held = n * parts * columns * itemsize * max(under_way, 1)
                if held <= REGISTERS and not (under_way == steps and stages > 1):
                    tiles.append(GemvTile(m, n, parts, columns, under_way, stages, max(4, parts)))
    yield from nearest_first(default, tiles)


def _draw_weight(generator: torch.Generator, n: int, k: int, itemsize: int) -> Inputs:
    if itemsize == 1:
        return dict(zip(("w", "scale"), fp8_weight(generator, n, k), strict=True))
    return {"w": draw_tensor(generator, n, k).mul_(k**-0.5), "scale": None}


def _wide(inputs: Inputs) -> Tensor:
    """The weight in float64."""
    w, scale = inputs["w"], inputs["scale"]
    return (w if scale is None else dequantize(w, scale, ref.BLOCK, torch.float32)).double()


def _search(rows: int, n: int, k: int, itemsize: int, normed: bool, default: GemvTile) -> TuningSearch:
    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        norm = torch.rand(k, generator=generator, device=generator.device) + 0.5
        return {"x": draw_tensor(generator, rows, k), "norm": norm} | _draw_weight(generator, n, k, itemsize)

    def multiply(tile: GemvTile, inputs: Inputs, epilogue: Epilogue, swiglu: bool = False) -> Tensor:
        x = LazyNorm(inputs["x"], inputs["norm"], EPS) if normed else inputs["x"]
        return gemm.gemv(x, inputs["w"], tile, inputs["scale"], epilogue, swiglu)

    def run(tile: GemvTile, inputs: Inputs) -> tuple[Tensor, ...]:
        return (multiply(tile, inputs, Epilogue()),)

    def reference(inputs: Inputs) -> tuple[Tensor, ...]:
        x = inputs["x"].double()
        if normed:
            x = x * torch.rsqrt((x * x).mean(1, keepdim=True) + EPS) * inputs["norm"]
        return (x @ _wide(inputs).t(),)

    def uses(tile: GemvTile, inputs: Inputs) -> list[Pair]:
        """With a residual; and, in bf16, as the first half of a SwiGLU, which pairs rows of the weight otherwise."""
        (exact,) = reference(inputs)
        added = Epilogue(residual_MN=exact.bfloat16())
        pairs: list[Pair] = [(lambda: multiply(tile, inputs, added), lambda: 2 * exact)]
        if itemsize == 2 and n % 2 == 0:
            gate, up = exact.chunk(2, 1)
            pairs.append((lambda: multiply(tile, inputs, Epilogue(), True), lambda: F.silu(gate) * up))
        return pairs

    return TuningSearch(
        operation="gemv",
        key=(n, k, itemsize, int(normed)),
        label=f"{rows} x {n} x {k}, {'bf16' if itemsize == 2 else 'e4m3'}{', normed' * normed}",
        default=default,
        candidates=tuple(candidates(default, rows, k, itemsize)),
        draw=draw,
        run=run,
        reference=reference,
        tolerance=1e-2,
        bytes=n * k * itemsize,
        uses=uses,
    )


def threshold(n: int, k: int) -> TuningSearch:
    """The rows up to which "triton+deep_gemm" takes the own kernel, for a weight [n, k] of e4m3. Each candidate
    computes products of every number of rows in LADDER: the sum is least where each has the faster of both.
    """

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        inputs: Inputs = {f"x{rows}": draw_tensor(generator, rows, k) for rows in LADDER}
        return inputs | _draw_weight(generator, n, k, 1)

    def run(few: int, inputs: Inputs) -> tuple[Tensor, ...]:
        backends = ((rows, fp8.PRODUCTS["triton" if rows <= few else "deep_gemm"]) for rows in LADDER)
        return tuple(multiply(inputs[f"x{rows}"], inputs["w"], inputs["scale"]) for rows, multiply in backends)

    def reference(inputs: Inputs) -> tuple[Tensor, ...]:
        weight = _wide(inputs).float()
        return tuple(inputs[f"x{rows}"].float() @ weight.t() for rows in LADDER)

    return TuningSearch(
        operation="fp8_rows",
        key=(n, k),
        label=f"rows up to which the own kernel computes, {n} x {k}, e4m3",
        default=fp8.FEW,
        candidates=(0, *LADDER),
        draw=draw,
        run=run,
        reference=reference,
        tolerance=4e-2,
        bytes=n * k * len(LADDER),
        alike=True,
    )
