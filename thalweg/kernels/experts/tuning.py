"""The tiles of experts that `thalweg tune` tries, for one stack of experts and each number of tokens at which the
tables have others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from thalweg.kernels.case import Inputs
from thalweg.kernels.experts import case, triton
from thalweg.kernels.experts.triton import ExpertTile, ExpertTiles, ExpertWeights, Plan
from thalweg.kernels.quantize.triton import quantize
from thalweg.kernels.router.triton import RouterOutput
from thalweg.kernels.search import TuningSearch, nearest_first

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHARED_MEMORY = 232448  # bytes that a program may have on Hopper
STACKS = ("w13_NIH", "w2_NHI", "s13", "s2")


def searches(experts: int, hidden: int, inner: int, topk: int, shared: int, codes: bool) -> Iterator[TuningSearch]:
    """experts, topk: with the shared ones, whose number is `shared`. codes: whether weights are e4m3."""
    seen = set()
    tma = not codes and torch.cuda.is_available() and triton.serves_tma(torch.empty(0, hidden, inner, device="cuda"))
    for tokens in TOKENS:
        by = triton.path(tokens, codes, False, tma)
        plan = by, triton.tabled(by, tokens, topk, experts, codes)
        if plan not in seen:
            seen.add(plan)
            yield _search(case.Shape(tokens, experts, topk, hidden, inner, shared), codes, plan)


def candidates(default: ExpertTiles, by: str, codes: bool) -> Iterator[ExpertTiles]:
    """The table's tiles first; then with one side varied, the nearest first. The rows of a tile stay, so that pairs are
    sorted as before.
    """
    yield default
    others = [replace(default, ahead=ahead) for ahead in (0, 1, 3, 4) if by == "pairs"]
    others += [replace(default, up=up) for up in _sides(default.up, by, codes, gated=True)]
    others += [replace(default, down=down) for down in _sides(default.down, by, codes, gated=False)]
    yield from nearest_first(default, others)


def combined(default: ExpertTiles, timed: Sequence[ExpertTiles]) -> list[ExpertTiles]:
    """The best of each side together. Up and down run after each other, so what one gains does not depend on the
    other.
    """
    up = next(tiles.up for tiles in timed if (tiles.down, tiles.ahead) == (default.down, default.ahead))
    best = replace(next(tiles for tiles in timed if tiles.up == default.up), up=up)
    return [] if best in timed else [best]


def _sides(base: ExpertTile, by: str, codes: bool, gated: bool) -> Iterator[ExpertTile]:
    if by == "pairs":
        forms = product((4, 8, 16, 32), (128, 256, 512), (1, 3, 4, 5, 6), (4, 8))
    elif codes:  # n is one block of multipliers, because `_up` quantizes its result
        forms = product((128,) if gated else (64, 128), (128,), (2, 3, 4, 5, 6), (4, 8))
    else:
        forms = product((32, 64, 128, 256), (64, 128), (2, 3, 4, 5), (4, 8))
    for n, k, stages, warps in forms:
        # bytes of shared memory of a pipeline
        held = stages * k * (base.m + n * (1 + gated)) * (1 if codes else 2)
        if by == "pairs" or held <= SHARED_MEMORY:
            yield ExpertTile(base.m, n, k, stages, warps)


def _search(shape: case.Shape, codes: bool, plan: Plan) -> TuningSearch:
    tokens, experts, topk, hidden, inner, shared = shape
    by, default = plan
    dtype = torch.float8_e4m3fn if codes else torch.bfloat16

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        inputs = case.draw_inputs(generator, before, shape, dtype)
        inputs["out_TH"].zero_()
        # a router has quantized x
        return inputs | dict(zip(("codes", "scales"), quantize(inputs["x_TH"]) if codes else (None, None), strict=True))

    def run(tiles: ExpertTiles, inputs: Inputs) -> tuple[Tensor, ...]:
        out_TH = torch.zeros_like(inputs["out_TH"])
        routed = RouterOutput(inputs["weights_TK"], inputs["ids_TK"], inputs["codes"], inputs["scales"], shared)
        weights = ExpertWeights(*(inputs.get(name) for name in STACKS))  # type: ignore[arg-type]
        triton.run_experts(out_TH, inputs["x_TH"], routed, weights, plan=(by, tiles))
        return (out_TH,)

    return TuningSearch(
        operation="experts",
        key=(by, experts, hidden, inner, int(codes)),
        label=f"{tokens} tokens, {topk} of {experts} experts, {hidden} x {inner}, {'e4m3' if codes else 'bf16'}, {by}",
        default=default,
        candidates=tuple(candidates(default, by, codes)),
        draw=draw,
        run=run,
        reference=lambda inputs: (case.run_fp8 if codes else case.run)(**inputs),
        tolerance=4e-2 if codes else 2e-2,
        bytes=3 * hidden * inner * min(experts, tokens * topk) * dtype.itemsize,
        further=partial(combined, default),
    )
