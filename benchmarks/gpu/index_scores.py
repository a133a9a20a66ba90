"""Index scores of sparse attention (DSA) on one Hopper, 64 heads of 128 dims and e4m3 keys: our kernel and DeepGEMM's,
each in a CUDA graph over pages that no cache holds. Then the choice of the 2,048 highest, by our kernel, FlashInfer's
where it is installed, and torch.topk, which chooses among the whole capacity.

    python benchmarks/gpu/index_scores.py [--only decode,prompts,choice]

First DeepGEMM is checked. Then a table, and $OUT/index_scores.json (or ./index_scores.json): microseconds, GB/s of the
keys and scores, TFLOP/s, and the share of the floor max(bytes / read rate, FLOPs / e4m3 rate), both rates measured in
the same run. A floor reads the keys of each row once.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from attention import BEYOND_L2, DEVICE, Table, ceilings, contexts, microseconds
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.core.plan import PAGE
from thalweg.kernels.attend.args import QueryRows
from thalweg.kernels.dsa import deep_gemm
from thalweg.kernels.dsa import triton as dsa
from thalweg.layers.paged_sparse import SCORES_AT_ONCE

HEADS, DIM, TOPK = 64, 128, 2048
KEY, PAIR_FLOPS = DIM + 4, 2 * HEADS * DIM  # bytes; FLOPs of a query token and a key
Calls = list[Callable[[], object]]


def e4m3_rate() -> float:
    """FLOPs a second of a product of codes."""
    a, b = (torch.randn(8192, 8192, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=DEVICE)
    product = functools.partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16)
    return 2 * 8192**3 / (microseconds([product], 0.3) * 1e-6)


def plane(pages: int) -> Tensor:
    """Codes of every page, and then their scales."""
    keys = torch.empty(pages, PAGE * KEY, dtype=torch.uint8, device=DEVICE)
    for some in keys.split(1 << 12):
        codes = torch.randn(len(some), PAGE * DIM, device=DEVICE).to(torch.float8_e4m3fn)
        some[:, : PAGE * DIM] = codes.view(torch.uint8)
        some[:, PAGE * DIM :] = torch.ones(len(some), PAGE, device=DEVICE).view(torch.uint8)
    return keys.view(pages, PAGE, KEY)


def queries(tokens: int) -> tuple[Tensor, Tensor]:
    """With the weights of their heads."""
    query = torch.randn(tokens, HEADS * DIM, device=DEVICE).to(torch.float8_e4m3fn)
    return query, torch.randn(tokens, HEADS, device=DEVICE)


def decode(table: Table, rows: int, context: int, query: int) -> None:
    """Rows of `query` tokens, the last of contexts of `context` tokens."""
    pages, tables, _ = contexts(rows, context, KEY)
    keys, (asked, weights) = plane(pages), queries(rows * query)
    rows_T = torch.arange(rows, dtype=torch.int32, device=DEVICE).repeat_interleave(query)
    positions = torch.arange(context - query, context, device=DEVICE).repeat(rows)
    steps = [QueryRows(rows_T, table_RL, positions) for table_RL in tables]

    def own() -> Calls:
        return [functools.partial(dsa.scores, asked, weights, keys, step, context) for step in steps]

    def library() -> Calls:
        plans = [deep_gemm.schedule_decode(step, query) for step in steps]
        return [functools.partial(deep_gemm.decode_scores, asked, weights, keys, plan, context) for plan in plans]

    pairs, name = rows * query * context, f"{rows} x {query} tokens at {context}"
    work = rows * context * KEY + 4 * pairs, PAIR_FLOPS * pairs
    table.add(f"decode, {name}, triton", own, *work)
    table.add(f"decode, {name}, deep_gemm", library, *work)
    plans: Calls = [functools.partial(deep_gemm.schedule_decode, step, query) for step in steps]
    table.add(f"plan of a step, {name}, deep_gemm", lambda: plans, 0, 0)


def prompts(table: Table, tokens: int, before: int) -> None:
    """The tokens of a prompt behind so many, in launches as a layer has them."""
    context = before + tokens
    pages, tables, _ = contexts(1, context, KEY)
    keys, (asked, weights) = plane(pages), queries(tokens)
    positions, rows_T = torch.arange(before, context, device=DEVICE), torch.zeros(tokens, dtype=torch.int32).to(DEVICE)
    at_once = max(SCORES_AT_ONCE // (4 * context), 1)
    launches = [slice(first, min(first + at_once, tokens)) for first in range(0, tokens, at_once)]

    def own(table_RL: Tensor) -> None:
        rows = QueryRows(rows_T, table_RL, positions)
        for some in launches:
            dsa.scores(asked[some], weights[some], keys, rows.some(some), context)

    plans = [deep_gemm.prompt_bounds(positions[some]) for some in launches]

    def library(table_RL: Tensor) -> None:
        gathered = deep_gemm.gather_keys(keys, table_RL[0])
        for some, plan in zip(launches, plans, strict=True):
            deep_gemm.prompt_scores(asked[some], weights[some], gathered, plan, context)

    pairs, name = tokens * before + tokens * (tokens + 1) // 2, f"{tokens} tokens behind {before}"
    work = context * KEY + 4 * pairs, PAIR_FLOPS * pairs
    for by, call in ("triton", own), ("deep_gemm", library):
        table.add(f"prompt, {name}, {by}", lambda call=call: [functools.partial(call, one) for one in tables], *work)
    gathers: Calls = [functools.partial(deep_gemm.gather_keys, keys, table_RL[0]) for table_RL in tables]
    table.add(f"gathered keys, {name}, deep_gemm", lambda: gathers, 2 * context * KEY, 0)


def choice(table: Table, rows: int, context: int, capacity: int) -> None:
    """The highest scores of rows of one context, among columns for `capacity` tokens."""
    copies = max(2, min(BEYOND_L2 // (4 * rows * capacity), 64))
    some = [torch.randn(rows, capacity, device=DEVICE) for _ in range(copies)]
    positions = torch.full((rows,), context - 1, device=DEVICE)
    want = some[0][:, :context].topk(TOPK, sorted=False).values.sort(1).values

    def check(chosen: Tensor) -> None:
        """By scores, since each may choose others of equal ones."""
        assert torch.equal(some[0].gather(1, chosen.long()).sort(1).values, want)

    check(dsa.choose(some[0], positions, TOPK))
    calls = {
        "triton": [functools.partial(dsa.choose, one, positions, TOPK) for one in some],
        "torch.topk": [functools.partial(torch.topk, one, TOPK, sorted=False) for one in some],
    }
    if importlib.util.find_spec("flashinfer") is not None:
        from flashinfer import top_k_ragged_transform

        first, lengths = torch.zeros_like(positions).int(), positions.int() + 1
        check(top_k_ragged_transform(some[0], first, lengths, TOPK))
        calls["flashinfer"] = [functools.partial(top_k_ragged_transform, one, first, lengths, TOPK) for one in some]
    name = f"choice, {rows} x {context}" + (f" of {capacity}" if capacity > context else "")
    for by, made in calls.items():
        table.add(f"{name}, {by}", lambda made=made: made, 4 * rows * (context + TOPK), 0)


PARTS: dict[str, tuple[Callable[..., None], list[tuple[int, ...]]]] = {
    "decode": (
        decode,
        [(rows, context, 1) for context in (4096, 32768, 131072) for rows in (1, 32, 128)]
        + [(32, 32768, query) for query in (2, 3, 4)],
    ),
    "prompts": (
        prompts,
        [(4096, 0), (4096, 28672)] + [(tokens, 28672) for tokens in (16, 32, 64, 128, 256, 512)],
    ),
    "choice": (
        choice,
        [(1, 4096, 4096), (64, 16384, 16384), (128, 65536, 65536), (4096, 8192, 8192)]
        + [(rows, context, 131328) for context in (4096, 32768, 131072) for rows in (1, 32, 128)],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    asked = parser.parse_args()
    for heads in (32, 64):
        deep_gemm.check(DEVICE, CheckCase("deep_gemm", heads=heads, head_dim=DIM))
    table = Table({"read": ceilings()["read"], "e4m3": e4m3_rate()}, "e4m3")
    print({name: f"{rate * 1e-12:.2f} T/s" for name, rate in table.rates.items()}, f"beyond {BEYOND_L2 >> 20} MiB")
    for name in asked.only.split(","):
        part, cases = PARTS[name]
        for case in cases:
            part(table, *case)
            torch.cuda.empty_cache()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name()}
    path = Path(os.environ.get("OUT", ".")) / "index_scores.json"
    path.write_text(json.dumps({**versions, "rates": table.rates, "rows": table.rows}, indent=1))


if __name__ == "__main__":
    main()
