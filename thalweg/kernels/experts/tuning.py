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

from thalweg.kernels.case import Inputs, draw_tensor
from thalweg.kernels.experts import case, case_fp8, fp8, triton
from thalweg.kernels.experts.triton import ExpertTile, ExpertTiles, ExpertWeights
from thalweg.kernels.quantize.triton import quantize
from thalweg.kernels.router.triton import RouterOutput
from thalweg.kernels.search import TuningSearch

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHARED = 232448  # bytes of shared memory that a program may have on Hopper


def searches(experts: int, hidden: int, inner: int, topk: int, shared: int, codes: bool) -> Iterator[TuningSearch]:
    """experts, topk: with the shared ones, whose number is `shared`. codes: whether weights are e4m3."""
    seen = set()
    for tokens in TOKENS:
        by = triton.path(tokens, codes, False)
        tables = {"pairs": triton.pair_tiles, "direct": triton.direct_tiles}
        default = tables[by]() if by in tables else triton.tiles(tokens, topk, experts, codes, False)
        if (by, default) not in seen:
            seen.add((by, default))
            yield _search(tokens, (experts, hidden, inner), topk, shared, codes, by, default)


def candidates(default: ExpertTiles, by: str, codes: bool) -> Iterator[ExpertTiles]:
    """The table's first; then with one side varied, the nearest first. The rows of a tile stay, so that pairs are
    sorted as before.
    """
    yield default
    ups = [(_distance(up, default.up), replace(default, up=up)) for up in _sides(default.up, by, codes, gated=True)]
    downs = [
        (_distance(down, default.down), replace(default, down=down))
        for down in _sides(default.down, by, codes, gated=False)
    ]
    if by == "pairs":
        yield from (replace(default, ahead=ahead) for ahead in (0, 1, 3, 4) if ahead != default.ahead)
    yield from (tiles for _, tiles in sorted([*ups, *downs], key=lambda one: one[0]))


def combined(default: ExpertTiles, timed: Sequence[ExpertTiles]) -> list[ExpertTiles]:
    """The best of each side together: what one side gains does not depend on the other, since they are kernels behind
    each other.
    """
    up = next(one.up for one in timed if (one.down, one.ahead) == (default.down, default.ahead))
    down = next(one for one in timed if one.up == default.up)
    both = ExpertTiles(up, down.down, down.ahead)
    return [] if both in timed else [both]


def _sides(base: ExpertTile, by: str, codes: bool, gated: bool) -> list[ExpertTile]:
    if by == "pairs":
        forms = product((4, 8, 16, 32), (128, 256, 512), (1, 3, 4, 5, 6), (4, 8))
    elif codes:  # n is one block of multipliers, because `_up` quantizes what it makes
        forms = product((128,) if gated else (64, 128), (128,), (2, 3, 4, 5, 6), (4, 8))
    else:
        forms = product((32, 64, 128, 256), (64, 128), (2, 3, 4, 5), (4, 8))
    made = [ExpertTile(base.m, *form) for form in forms]
    width = 1 if codes else 2
    fit = [one for one in made if one != base and (by == "pairs" or _held(one, width, gated) <= SHARED)]
    return sorted(fit, key=lambda one: (_distance(one, base), repr(one)))


def _held(tile: ExpertTile, width: int, gated: bool) -> int:
    """Bytes of shared memory of a pipeline."""
    return tile.stages * tile.k * (tile.m + tile.n * (1 + gated)) * width


def _distance(one: ExpertTile, other: ExpertTile) -> int:
    pairs = ((one.n, other.n), (one.k, other.k), (one.warps, other.warps))
    return sum(abs(a.bit_length() - b.bit_length()) for a, b in pairs) + abs(one.stages - other.stages)


def _search(
    tokens: int, stack: tuple[int, int, int], topk: int, shared: int, codes: bool, by: str, default: ExpertTiles
) -> TuningSearch:
    experts, hidden, inner = stack

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        if before is not None:
            stacks = before
        elif codes:
            stacks = case_fp8.stacks(generator, hidden, inner, experts)
        else:
            w13 = draw_tensor(generator, experts, 2 * inner, hidden).mul_(hidden**-0.5)
            stacks = {
                "w13_NIH": w13,
                "w2_NHI": draw_tensor(generator, experts, hidden, inner).mul_(inner**-0.5),
                "s13": None,
                "s2": None,
            }
        picked = case.chosen(generator, tokens, experts, topk, shared)
        own = {"x": draw_tensor(generator, tokens, hidden), "ids": picked["ids_TK"], "weights": picked["weights_TK"]}
        own |= dict(zip(("codes", "scales"), quantize(own["x"]) if codes else (None, None), strict=True))  # a router's
        return {name: stacks[name] for name in ("w13_NIH", "w2_NHI", "s13", "s2")} | own

    def run(tiles: ExpertTiles, given: Inputs) -> tuple[Tensor, ...]:
        out, routed = (
            torch.zeros_like(given["x"]),
            RouterOutput(given["weights"], given["ids"], given["codes"], given["scales"], shared),
        )
        stacks = ExpertWeights(given["w13_NIH"], given["w2_NHI"], given["s13"], given["s2"])
        triton.add_experts_(out, given["x"], routed, stacks, given=tiles, by=by)
        return (out,)

    def reference(given: Inputs) -> tuple[Tensor, ...]:
        out, ids = torch.zeros(tokens, hidden, device=given["x"].device), given["ids"]
        if codes:
            pairs = (given["w13_NIH"], given["s13"]), (given["w2_NHI"], given["s2"])
            return (fp8.add_experts_(out, given["x"], ids, given["weights"], *pairs),)
        return case.run(out, given["x"], ids, given["weights"], given["w13_NIH"], given["w2_NHI"])

    key = (by, experts, hidden, inner, int(codes))
    label = f"{tokens} tokens, {topk} of {experts} experts, {hidden} x {inner}, {'e4m3' if codes else 'bf16'}, {by}"
    size = 3 * hidden * inner * min(experts, tokens * topk) * (1 if codes else 2)
    found = tuple(candidates(default, by, codes))
    return TuningSearch(
        "experts",
        key,
        label,
        default,
        found,
        draw,
        run,
        reference,
        4e-2 if codes else 2e-2,
        size,
        partial(combined, default),
    )
