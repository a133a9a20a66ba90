"""Tiles of the kernels of INT4 experts, timed with DeepSeek-V3's experts on one GPU.

    python benchmarks/gpu/int4_tiles.py

`expert_tile` of thalweg/kernels/weight_only/triton.py is the table that they lead to. Writes $OUT/int4_tiles.json (OUT:
the current folder if unset): of each kind and tile, its share of the limit with few tokens, and microseconds with many.
Times and limits are as in `coded.py`. Compiling takes most of the time, and what is compiled is cached.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from coded import check_codes, nbytes, random_codes, time_experts
from moe import SLIM, ceilings

from thalweg.kernels.experts.backends import coded_runner
from thalweg.kernels.weight_only import triton as codes
from thalweg.kernels.weight_only.triton import WeightOnlyTile

FEW, SOME = (1, 8, 32, 128), 600  # tokens; below so many the weights take the time
# rows of x, rows of the weight, columns of a step, stages, warps, splits, tail; and the tokens that they are timed with
TILES: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], ...] = (
    (
        FEW,
        tuple(
            (16, rows, step, stages, warps)
            for step, some in ((128, (4, 6)), (256, (2, 3, 4)), (512, (2, 3)))
            for stages in some
            for rows, warps in ((64, 4), (128, 8))
        ),
    ),
    ((512,), ((32, 64, 128, 4, 4), (32, 64, 256, 3, 4), (32, 128, 256, 3, 8))),
    ((1024,), ((64, 64, 128, 4, 4), (64, 64, 256, 3, 4), (64, 128, 128, 4, 8), (64, 128, 256, 2, 8))),
    (
        (4096, 16384),
        (
            (64, 64, 256, 3, 4),
            (64, 128, 128, 4, 4),
            (64, 128, 128, 4, 8),
            (64, 128, 256, 3, 4),
            (128, 128, 128, 3, 8),
            (128, 128, 128, 4, 8),
            *(
                (m, 128, 128, stages, 8, 1, tail)
                for m, tail in ((64, 16), (64, 32), (128, 16), (128, 32))
                for stages in (3, 4)
            ),
        ),
    ),
)


def measure(kind: str, top: dict[str, float], rows: list[dict[str, Any]]) -> None:
    """Appends to the rows. kind: as in `coded.CODED`."""
    sizes = (2 * SLIM.inner, SLIM.hidden), (SLIM.hidden, SLIM.inner)
    stacks = codes.CodedExperts(*(random_codes(kind, SLIM.stack, *size) for size in sizes))
    size, math = (nbytes(stacks.w13) + nbytes(stacks.w2)) // SLIM.stack, "fp8" if kind == "w4a8" else "bf16"
    for tokens, tiles in TILES:
        for tile in tiles:
            codes.expert_tile = lambda *_, tile=tile: WeightOnlyTile(*tile)  # type: ignore[misc]
            row: dict[str, Any] = {"kind": kind, "tile": tile, "error": check_codes(kind, tokens[0])["error"]}
            for count in tokens:
                timed = time_experts(coded_runner(), stacks, size, count, top, math)
                row[f"{count} tokens"] = round(timed["share"], 3) if count < SOME else round(timed["us"])
            print(row, flush=True)
            rows.append(row)


def save(top: dict[str, float], rows: list[dict[str, Any]]) -> None:
    record = {
        "command": "python benchmarks/gpu/int4_tiles.py",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": top,
        "rows": rows,
    }
    Path(os.environ.get("OUT", "."), "int4_tiles.json").write_text(json.dumps(record, indent=1))


def main() -> None:
    top, rows = ceilings(), list[dict[str, Any]]()
    try:
        with torch.inference_mode():
            for kind in ("w4a8", "w4a16"):
                measure(kind, top, rows)
    finally:  # Ctrl-C keeps what was measured
        save(top, rows)


if __name__ == "__main__":
    main()
