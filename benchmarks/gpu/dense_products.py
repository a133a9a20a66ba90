"""Products of a bf16 weight with the rows of a decode step, by library: `python benchmarks/gpu/dense_products.py`.

cuBLAS, DeepGEMM and our own kernel where it serves, on the weights of Qwen2.5-7B. Writes $OUT/dense_products.json (OUT:
the current folder if unset): microseconds, and the share of the limit, which is the bytes or the products, whichever
takes longer at the rates of the same run. Times and rates are as in `moe.py`; each result is compared with float32.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from moe import COPIES, CUDA, ceilings, timed
from torch import Tensor
from torch.nn import functional as F

from thalweg.kernels.gemm import deep_gemm
from thalweg.kernels.small_batch_gemm import triton as small_batch_gemm

ROWS = (64, 128, 256, 512)
WEIGHTS = {
    "query, key, value": (4608, 3584),
    "output": (3584, 3584),
    "gate and up": (37888, 3584),
    "down": (3584, 18944),
    "head": (152064, 3584),
}
Product = Callable[[Tensor, Tensor], Tensor]


def by_deep_gemm(x: Tensor, w: Tensor) -> Tensor:
    y = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
    deep_gemm.library().bf16_gemm_nt(x, w, y)
    return y


def products(rows: int, weight: Tensor) -> dict[str, Product]:
    """Those that serve so many rows."""
    found: dict[str, Product] = {"cuBLAS": F.linear}
    if deep_gemm.available():
        found["DeepGEMM"] = by_deep_gemm
    if small_batch_gemm.linear_fits(rows, weight):
        found["own"] = small_batch_gemm.linear
    return found


def measure(name: str, size: tuple[int, int], top: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of the result of a weight of this size. Copies of it are multiplied in turn, so it comes from memory."""
    copies = max(2, min(COPIES, int(4e8 / (2 * size[0] * size[1]))))
    weights, found = [torch.randn(size, device=CUDA, dtype=torch.bfloat16) * 0.02 for _ in range(copies)], []
    for rows in ROWS:
        x = torch.randn(rows, size[1], device=CUDA, dtype=torch.bfloat16)
        limit = max(
            2 * (weights[0].numel() + rows * sum(size)) / top["read"], 2 * rows * weights[0].numel() / top["bf16"]
        )
        exact = x.float() @ weights[0].float().t()
        for by, product in products(rows, weights[0]).items():
            error = float((product(x, weights[0]).float() - exact).norm() / exact.norm())
            took = timed([partial(product, x, w) for w in weights])
            row = {"weight": name, "size": size, "rows": rows, "by": by, "us": took * 1e6, "share": limit / took}
            found.append(row | {"error": error})
            print(f"{name} {rows} rows, {by}: {took * 1e6:.1f} us, {limit / took:.2f}, error {error:.4f}", flush=True)
    return found


def main() -> None:
    top, rows = ceilings(), list[dict[str, Any]]()
    with torch.inference_mode():
        for name, size in WEIGHTS.items():
            rows += measure(name, size, top)
    record = {
        "command": "python benchmarks/gpu/dense_products.py",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": top,
        "rows": rows,
    }
    Path(os.environ.get("OUT", "."), "dense_products.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
