"""Tiles of the kernels of INT4 and INT8 experts, timed with DeepSeek-V3's experts on one GPU.

    python benchmarks/gpu/coded_tiles.py [TOKENS]

`expert_tile` of thalweg/kernels/weight_only/triton.py is the table that they lead to. Writes $OUT/coded_tiles.json
(OUT: the current folder if unset): of each kind and tile, its share of the limit with few tokens, and microseconds with
many. TOKENS: numbers of `TILES`; others are left out. Times and limits are as in `coded.py`. Compiling takes most of
the time, and what is compiled is cached.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from coded import check_codes, nbytes, random_codes, time_experts
from moe import SLIM, ceilings

from thalweg.kernels.experts.backends import coded_runner
from thalweg.kernels.weight_only import triton as codes
from thalweg.kernels.weight_only.triton import WeightOnlyTile as Tile

SOME = 600  # tokens; below so many the weights take the time
FEW = tuple(
    Tile(16, rows, step, stages, warps)
    for step, some in ((128, (4, 6)), (256, (2, 3, 4)), (512, (2, 3)))
    for stages in some
    for rows, warps in ((64, 4), (128, 8))
)
# two programs on a multiprocessor have 128 registers a thread, with 8 warps each
MANY = tuple(Tile(64, 128, 128, 3, 8, tail=tail, registers=128) for tail in (0, 16)) + tuple(
    Tile(128, 128, 128, 3, 8, tail=tail) for tail in (0, 16, 32)
)
TILES: dict[str, dict[tuple[int, ...], tuple[Tile, ...]]] = {  # of a kind, by the tokens that they are timed with
    "w4a8": {
        (1, 8, 32, 128): FEW,
        (512,): (Tile(32, 64, 128, 4, 4), Tile(32, 64, 256, 3, 4), Tile(32, 128, 256, 3, 8)),
        (1024,): (Tile(64, 64, 128, 4, 4), Tile(64, 128, 256, 3, 4), *MANY[:2]),
        (4096, 16384): (
            Tile(64, 128, 256, 3, 4),
            *MANY,
            *(Tile(128, 64, 128, 3, 4, tail=tail) for tail in (0, 16, 32)),
            *(Tile(64, 64, 128, 4, 4, tail=tail) for tail in (0, 16)),
        ),
    },
    "w4a16": {
        (1, 8, 32, 128): FEW,
        (512,): (Tile(32, 64, 128, 4, 4), Tile(32, 64, 256, 3, 4), Tile(32, 128, 256, 3, 8)),
        (1024,): (Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 8)),
        (4096, 16384): (Tile(64, 128, 128, 4, 8), *MANY, Tile(128, 64, 128, 2, 4, tail=16)),
    },
    "w8a8": {
        (1024,): (Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 3, 8), Tile(64, 128, 256, 2, 8)),
        (4096, 16384): (
            Tile(128, 128, 128, 3, 8),
            *(Tile(128, 128, 128, 3, 8, tail=tail, registers=128) for tail in (0, 16, 32)),
            Tile(64, 128, 128, 3, 8, tail=16, registers=128),
        ),
    },
    "w8a8 blocks": {
        (1024,): (Tile(64, 64, 128, 4, 4), Tile(128, 64, 128, 3, 4)),
        (4096, 16384): (
            Tile(128, 128, 128, 3, 8),
            Tile(64, 128, 128, 3, 8),
            *(Tile(128, 64, 128, 3, 4, tail=tail) for tail in (0, 16)),
        ),
    },
}


def measure(kind: str, wanted: set[int], top: dict[str, float], rows: list[dict[str, Any]]) -> None:
    """Appends to the rows. kind: as in `coded.CODED`. wanted: numbers of tokens; none: all."""
    sizes = (2 * SLIM.inner, SLIM.hidden), (SLIM.hidden, SLIM.inner)
    stacks = codes.CodedExperts(*(random_codes(kind, SLIM.stack, *size) for size in sizes))
    size, math = (nbytes(stacks.w13) + nbytes(stacks.w2)) // SLIM.stack, "bf16" if kind == "w4a16" else "fp8"
    for tokens, tiles in TILES[kind].items():
        counts = [count for count in tokens if not wanted or count in wanted]
        for tile in tiles if counts else ():
            codes.expert_tile = lambda *_, tile=tile: tile  # type: ignore[misc]
            row: dict[str, Any] = {"kind": kind, "tile": asdict(tile), "error": check_codes(kind, counts[0])["error"]}
            for count in counts:
                timed = time_experts(coded_runner(), stacks, size, count, top, math)
                row[f"{count} tokens"] = round(timed["share"], 3) if count < SOME else round(timed["us"])
            print(row, flush=True)
            rows.append(row)


def save(top: dict[str, float], rows: list[dict[str, Any]]) -> None:
    record = {
        "command": " ".join(("python benchmarks/gpu/coded_tiles.py", *sys.argv[1:])),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": top,
        "rows": rows,
    }
    Path(os.environ.get("OUT", "."), "coded_tiles.json").write_text(json.dumps(record, indent=1))


def main() -> None:
    top, rows = ceilings(), list[dict[str, Any]]()
    try:
        with torch.inference_mode():
            for kind in TILES:
                measure(kind, set(map(int, sys.argv[1:])), top, rows)
                torch.cuda.empty_cache()
    finally:  # Ctrl-C keeps what was measured
        save(top, rows)


if __name__ == "__main__":
    main()
