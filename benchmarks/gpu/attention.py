"""Attention on one GPU: every case against float64, then the shapes that matter, timed inside a CUDA graph over buffers
that no cache holds.

    python benchmarks/gpu/attention.py [--quick] [--only write,mla,prefill,gqa,crossover,absorb] [--no-check]

Prints a table and writes $OUT/attention.json (or ./attention.json): microseconds, GB/s of the bytes that must be read,
TFLOP/s, and the share of the floor max(bytes / read rate, FLOPs / bf16 rate), both rates measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.runtime.errors import TritonError

sys.path.insert(0, str(Path(__file__).parents[2]))

from thalweg.config.backends import PREFILL
from thalweg.config.entry_point import load_entry
from thalweg.core.kernels import CheckCase
from thalweg.kernels.attend.args import DecodeRows, KvPlanes, KvWrite, LatentPlane, PagedRows, RaggedRows
from thalweg.kernels.attend.case import to_device
from thalweg.kernels.attend.triton import DETERMINISTIC_SPLITS, TileConfig, merge, wait_for_previous
from thalweg.kernels.gqa import case as gqa_case
from thalweg.kernels.gqa import fa3
from thalweg.kernels.gqa import triton as gqa
from thalweg.kernels.launch import launch_config
from thalweg.kernels.mla import case as mla_case
from thalweg.kernels.mla import fa3 as mla_fa3
from thalweg.kernels.mla import flashmla as flash_mla
from thalweg.kernels.mla import triton as mla
from thalweg.kernels.mla.backends import MlaDecodeKernel, MlaShape, TritonMlaDecode
from thalweg.kernels.rope import triton as rope

BEYOND_L2 = 160 << 20  # bytes that a round of calls reads
DEVICE = torch.device("cuda")
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, TritonError)
Rows = list[dict[str, Any]]


def microseconds(calls: list[Callable[[], object]], seconds: float = 0.06) -> float:
    """Median time of one call, of a graph that makes all of them one after another, at least 8, so that the launch of
    the graph is shared by several.
    """
    calls = calls * -(-8 // len(calls))
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def ceilings() -> dict[str, float]:
    """Bytes a second read by a sum, and FLOPs a second of a bf16 product."""
    x = torch.ones(1 << 30, dtype=torch.bfloat16, device=DEVICE)
    read = x.numel() * 2 / (microseconds([lambda: x.view(1 << 12, -1).sum(1)], 0.2) * 1e-6)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return {"read": read, "bf16": 2 * 8192**3 / (microseconds([lambda: a @ b], 0.3) * 1e-6)}


class Table:
    """Rows of measurements; a measurement that fails is a row that says why."""

    def __init__(self, rates: dict[str, float], product: str = "bf16") -> None:
        """product: the rate of the FLOPs."""
        self.rates, self.product, self.rows = rates, product, Rows()

    def add(self, name: str, make: Callable[[], list[Callable[[], object]]], bytes_: float, flops: float) -> None:
        try:
            us = microseconds(make())
        except FAILURES as error:  # one kernel that does not launch must not hide the others
            print(f"{name:70s} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            self.rows.append({"name": name, "error": f"{type(error).__name__}: {error}"[:1000]})
            return
        floor = max(bytes_ / self.rates["read"], flops / self.rates[self.product]) * 1e6
        row = {"name": name, "us": us, "gbs": bytes_ / us * 1e-3, "tflops": flops / us * 1e-6, "share": floor / us}
        print(f"{name:70s} {us:9.1f} us {row['gbs']:6.0f} GB/s {row['tflops']:5.0f} TF  {row['share']:.2f}", flush=True)
        self.rows.append(row)


def correct() -> Rows:
    """Every case of every kernel, fresh inputs, outputs poisoned."""
    rows, generator = Rows(), torch.Generator().manual_seed(time.time_ns() & 0xFFFFFF)
    for cases, run in (
        (mla_case.decode_cases, mla_case.run_decode),
        (mla_case.prefill_cases, mla_case.run_prefill),
        (gqa_case.paged_cases, gqa_case.run_paged),
    ):
        for case in cases(generator):
            torch.full((1 << 26,), torch.nan, device=DEVICE)
            try:
                given = {name: to_device(x, torch.device(DEVICE)) for name, x in case.fresh_inputs().items()}
                errors = case.errors(tuple(x.cpu() for x in run(**given)))
                verdict = "ok" if max(errors) <= case.tolerance else "WRONG"
            except FAILURES as error:  # see Table.add
                errors, verdict = (), f"FAILED {type(error).__name__}: {str(error)[:200]}"
                traceback.print_exc(limit=-3)
            rows.append({"name": case.name, "errors": errors, "verdict": verdict})
            print(f"{case.name:90s} {verdict} {[f'{error:.1e}' for error in errors]}", flush=True)
    return rows


def contexts(rows: int, context: int, bytes_: int) -> tuple[int, list[Tensor], Tensor]:
    """Pages in all, as many page tables as it takes to read beyond L2, and the positions of the last tokens."""
    pages = -(-context // 64)
    tables = min(max(BEYOND_L2 // max(rows * context * bytes_, 1), 1), 64)
    order = torch.randperm(rows * pages * tables, device=DEVICE).to(torch.int32) + 1
    positions = torch.full((rows,), context - 1, dtype=torch.int64, device=DEVICE)
    return rows * pages * tables + 1, list(order.view(tables, rows, pages)), positions


class Tried:
    """A module's choice of tiles put aside for these."""

    def __init__(self, module: Any, name: str, tiles: TileConfig) -> None:
        self.module, self.name, self.tiles, self.before = module, name, tiles, vars(module)[name]

    def __enter__(self) -> None:
        setattr(self.module, self.name, lambda *_: self.tiles)

    def __exit__(self, *_: object) -> None:
        setattr(self.module, self.name, self.before)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16).to(dtype)


def counting(rows: int, tokens: int) -> Tensor:
    return torch.arange(0, rows * tokens + 1, tokens, device=DEVICE, dtype=torch.int32)


def mla_decode(table: Table, quick: bool, heads: int, context: int, rows: int) -> None:
    pages, tables, positions = contexts(rows, context, 1152)
    plane, query, uv = random(pages, 64, 576), random(rows, heads, 576), random(heads, 128, 512).transpose(1, 2)
    bytes_, flops, chosen = (
        rows * context * 1152,
        2 * rows * heads * context * 1088,
        mla.splits_for(rows, heads, context),
    )
    own, scale = LatentPlane(plane), torch.full((1,), 0.05, device=DEVICE)
    codes = LatentPlane((plane / 0.05).to(torch.float8_e4m3fn), scale)

    def each(
        splits: int, after: str = "merge", latents: LatentPlane = own, is_fixed: bool = False
    ) -> list[Callable[[], object]]:
        def call(table_RL: Tensor) -> object:
            rows = DecodeRows(table_RL, positions)
            partial, lse = mla.decode(query, latents, rows, scale=0.07, rank=512, splits=splits, fixed=is_fixed)
            if after == "merge":
                return merge(partial, lse)
            return mla.merge_up(partial, lse, uv) if after == "merge_up" else partial

        return [functools.partial(call, table_RL) for table_RL in tables]

    name, fixed = f"mla decode {heads} heads, {rows} x {context}", DETERMINISTIC_SPLITS
    table.add(f"{name}, {chosen} splits, no merge", lambda: each(chosen, ""), bytes_, flops)
    table.add(f"{name}, {chosen} splits", lambda: each(chosen), bytes_, flops)
    if mla.merges_up(rows, heads, chosen):
        table.add(f"{name}, {chosen} splits, merge_up", lambda: each(chosen, "merge_up"), bytes_, flops)
    table.add(f"{name}, fixed", lambda: each(fixed, is_fixed=True), bytes_, flops)
    table.add(f"{name}, e4m3", lambda: each(chosen, latents=codes), bytes_ / 2, flops)
    if quick:
        return
    table.add(f"{name}, {chosen * 2} splits", lambda: each(chosen * 2), bytes_, flops)
    few = (
        (TileConfig(16, 64, 8, 3), 1),
        (TileConfig(16, 32, 4, 4), 1),
        (TileConfig(16, 32, 4, 3), 2),
        (TileConfig(16, 32, 4, 3), 1),
    )
    for tiles, times in few if heads <= 16 else ((TileConfig(64, 32, 8, 3), 1),):
        with Tried(mla, "decode_tiles", tiles):
            table.add(
                f"{name}, {chosen * times} splits, {tuple(tiles)}",
                functools.partial(each, chosen * times),
                bytes_,
                flops,
            )


def mla_prefill(table: Table, quick: bool, heads: int, rows: int, tokens: int) -> None:
    query, kv, latents = (
        random(rows * tokens, heads, 192),
        random(rows * tokens, heads, 256),
        random(rows * tokens, 576),
    )
    starts = counting(rows, tokens)

    def call() -> object:
        views = kv[..., :128], latents[:, 512:], kv[..., 128:]
        return mla.prefill(query, *views, RaggedRows(starts, starts, tokens, tokens), scale=0.07)

    name, flops = f"mla prefill {heads} heads, {rows} x {tokens}", rows * tokens * tokens * heads * 320
    table.add(name, lambda: [call], 0, flops)
    for tiles in () if quick else (TileConfig(128, 128, 8, 2), TileConfig(128, 32, 8, 3), TileConfig(64, 64, 4, 2)):
        with Tried(mla, "prefill_tiles", tiles):
            table.add(f"{name}, {tuple(tiles)}", lambda: [call], 0, flops)


def gqa_decode(table: Table, quick: bool, heads: int, kv_heads: int, context: int, rows: int) -> None:
    per_token = 4 * kv_heads * 128
    pages, tables, positions = contexts(rows, context, per_token)
    planes = tuple(random(pages, 64, kv_heads, 128) for _ in range(2))
    query, bytes_, flops = random(rows, heads, 128), rows * context * per_token, 4 * rows * heads * context * 128
    chosen, scale = gqa.splits_for(rows, heads, kv_heads, context), torch.full((1,), 0.05, device=DEVICE)
    own = KvPlanes(*planes)
    codes = KvPlanes(*((plane / 0.05).to(torch.float8_e4m3fn) for plane in planes), scale, scale)

    def each(splits: int, kv: KvPlanes = own) -> list[Callable[[], object]]:
        def call(table_RL: Tensor) -> object:
            return merge(*gqa.decode(query, kv, DecodeRows(table_RL, positions), scale=0.09, splits=splits))

        return [functools.partial(call, table_RL) for table_RL in tables]

    name = f"gqa decode {heads}/{kv_heads} heads, {rows} x {context}"
    table.add(f"{name}, {chosen} splits (chosen)", lambda: each(chosen), bytes_, flops)
    table.add(f"{name}, e4m3", lambda: each(chosen, codes), bytes_ / 2, flops)
    if quick:
        return
    for splits in sorted({max(chosen // 2, 1), chosen * 2} - {chosen}):
        table.add(f"{name}, {splits} splits", functools.partial(each, splits), bytes_, flops)
    for tiles in (TileConfig(16, 64, 4, 3), TileConfig(16, 64, 8, 4)):
        with Tried(gqa, "decode_tiles", tiles):
            table.add(f"{name}, {tuple(tiles)}", lambda: each(chosen), bytes_, flops)


def gqa_prefill(table: Table, quick: bool, heads: int, kv_heads: int, rows: int, tokens: int) -> None:
    pages = rows * tokens // 64
    key, value = (random(pages + 1, 64, kv_heads, 128) for _ in range(2))
    table_RL = (torch.randperm(pages, device=DEVICE).to(torch.int32) + 1).view(rows, -1)
    query, starts = random(rows * tokens, heads, 128), counting(rows, tokens)
    positions = torch.arange(tokens, device=DEVICE).repeat(rows)

    def call() -> object:
        return gqa.prefill(query, KvPlanes(key, value), PagedRows(table_RL, positions, starts, tokens), scale=0.09)

    name, flops = f"gqa prefill {heads}/{kv_heads} heads, {rows} x {tokens}", rows * tokens * tokens * heads * 256
    table.add(name, lambda: [call], 0, flops)
    for tiles in () if quick else (TileConfig(128, 64, 8, 3), TileConfig(128, 32, 8, 3), TileConfig(64, 64, 4, 2)):
        with Tried(gqa, "prefill_tiles", tiles):
            table.add(f"{name}, {tuple(tiles)}", lambda: [call], 0, flops)


def mla_write(table: Table, quick: bool, heads: int, tokens: int) -> None:
    down, plane, absorbed = (
        random(tokens, heads * 192 + 576),
        random(-(-tokens // 64) * 64 + 64, 576),
        random(tokens, heads, 576),
    )
    cos, sin, weight = random(8192, 32, dtype=torch.float32), random(8192, 32, dtype=torch.float32), random(512).float()
    positions = torch.arange(tokens, device=DEVICE)

    def call() -> None:
        queries = down[:, : heads * 192].view(tokens, heads, 192)[..., 128:]
        latent = down[:, heads * 192 :]
        turn, latents = KvWrite(cos, sin, positions, positions), LatentPlane(plane.view(-1, 64, 576))
        rope.mla_write(queries, absorbed[..., 512:], latent, rope.LatentNorm(weight), turn, latents)

    table.add(f"mla_write {heads} heads, {tokens} tokens", lambda: [call] * 20, tokens * (heads * 256 + 2304), 0)


def mla_absorb(table: Table, quick: bool, heads: int, tokens: int) -> None:
    """In one launch, and as `mla_write` and a batched product."""
    down, plane, uk = (
        random(tokens, heads * 192 + 576),
        random(-(-tokens // 64) * 64 + 64, 576),
        random(heads, 128, 512),
    )
    cos, sin, weight = random(8192, 32, dtype=torch.float32), random(8192, 32, dtype=torch.float32), random(512).float()
    positions, absorbed = torch.arange(tokens, device=DEVICE), random(tokens, heads, 576)
    queries, latent = down[:, : heads * 192].view(tokens, heads, 192), down[:, heads * 192 :]
    turn = KvWrite(cos, sin, positions, positions)
    given = latent, rope.LatentNorm(weight), turn, LatentPlane(plane.view(-1, 64, 576))

    def one() -> object:
        return rope.mla_absorb(queries, uk, *given)

    def two() -> None:
        rope.mla_write(queries[..., 128:], absorbed[..., 512:], *given)
        torch.bmm(queries[..., :128].transpose(0, 1), uk, out=absorbed[..., :512].transpose(0, 1))

    bytes_ = tokens * heads * (192 + 576) * 2 + heads * 128 * 1024
    table.add(f"mla_absorb {heads} heads, {tokens} tokens", lambda: [one] * 20, bytes_, 0)
    table.add(f"mla_write and bmm {heads} heads, {tokens} tokens", lambda: [two] * 20, bytes_, 0)


def gqa_write(table: Table, quick: bool, tokens: int) -> None:
    qkv, planes, positions = (
        random(tokens, 36, 128),
        random(2, tokens + 64, 4, 128),
        torch.arange(tokens, device=DEVICE),
    )
    cos, sin = random(8192, 64, dtype=torch.float32), random(8192, 64, dtype=torch.float32)

    def call() -> None:
        query, key, value = torch.split(qkv, [28, 4, 4], 1)
        turn = KvWrite(cos, sin, positions, positions)
        rope.gqa_write(query, key, value, rope.QkNorms(), turn, KvPlanes(planes[0], planes[1]))

    table.add(f"gqa_write 28/4 heads, {tokens} tokens", lambda: [call] * 20, tokens * (36 + 36 + 4) * 256, 0)


def flashmla(table: Table, quick: bool, heads: int, context: int, rows: int) -> None:
    """The library beside the own kernel; its scheduler runs once a step, so it is timed apart from the layers that
    share it.
    """
    if not flash_mla.available():
        print("flash_mla is not installed")
        return
    pages, tables, positions = contexts(rows, context, 1152)
    plane, query = random(pages, 64, 576), random(rows, heads, 576)
    bytes_, flops, name = (
        rows * context * 1152,
        2 * rows * heads * context * 1088,
        f"flashmla {heads} heads, {rows} x {context}",
    )
    kernel, latents = flash_mla.FlashMlaDecode(MlaShape(heads, 512, 0.07, False)), LatentPlane(plane)
    shared = kernel.prepare(DecodeRows(tables[0], positions))

    def call(table_RL: Tensor) -> object:
        return kernel.attend_with_lse(query, latents, DecodeRows(table_RL, positions), shared)

    def planned() -> object:
        rows = DecodeRows(tables[0], positions)
        return kernel.attend_with_lse(query, latents, rows, kernel.prepare(rows))

    table.add(name, lambda: [functools.partial(call, table_RL) for table_RL in tables], bytes_, flops)
    table.add(f"{name}, with its scheduler", lambda: [planned], bytes_, flops)


def crossover(table: Table, quick: bool, heads: int, context: int, rows: int) -> None:
    """A layer's decode attention up to its values by own kernels and by the library, whose schedule is made once a
    step: for `flashmla.CROSSOVERS`.
    """
    if not flash_mla.available():
        print("flash_mla is not installed")
        return
    pages, tables, positions = contexts(rows, context, 1152)
    plane, query, uv = random(pages, 64, 576), random(rows, heads, 576), random(heads, 128, 512).transpose(1, 2)
    scale, flops = torch.full((1,), 0.05, device=DEVICE), 2 * rows * heads * context * 1088
    codes = LatentPlane((plane / 0.05).to(torch.float8_e4m3fn), scale)

    def each(is_fp8: bool, kernel: MlaDecodeKernel) -> list[Callable[[], object]]:
        latents = codes if is_fp8 else LatentPlane(plane)
        steps = [DecodeRows(table_RL, positions, 1, context) for table_RL in tables]
        shared = kernel.prepare(steps[0])
        return [functools.partial(kernel.attend, query, latents, uv, rows, shared) for rows in steps]

    for is_fp8 in (False, True):
        name = f"decode to values {heads} heads, {rows} x {context}{', e4m3' * is_fp8}"
        shape = MlaShape(heads, 512, 0.07, is_fp8)
        for by, kernel in ("own", TritonMlaDecode(shape)), ("flashmla", flash_mla.FlashMlaDecode(shape)):
            calls = functools.partial(each, is_fp8, kernel)
            table.add(f"{name}, {by}", calls, rows * context * (576 if is_fp8 else 1152), flops)


@triton.jit(do_not_specialize=["tokens"])
def _bmm_fp8(
    x, w, scale, y, tokens, x_token, x_head, y_token, y_head,
    W_HEAD: constexpr, W_K: constexpr, W_N: constexpr, S_HEAD: constexpr, S_K: constexpr, S_N: constexpr,
    K: constexpr, M: constexpr, N: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (h, b, i): N columns of head h's product of the i-th M tokens with codes, whose blocks of 128 x 128 have a
    multiplier. The weights are loaded before the wait for x.
    """
    head, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * N
    lane, k, n = tl.program_id(2) * M + tl.arange(0, M), tl.arange(0, 128), first + tl.arange(0, N)
    weights = ()
    for block in tl.static_range(K // 128):
        at = w + head * W_HEAD + (block * 128 + k)[:, None] * W_K + n[None, :] * W_N
        weights = weights + (tl.load(at),)
    wait_for_previous(PDL)
    sums = tl.zeros((M, N), tl.float32)
    for block in tl.static_range(K // 128):
        at = x + lane.to(tl.int64)[:, None] * x_token + head * x_head + (block * 128 + k)[None, :]
        tile = tl.load(at, mask=(lane < tokens)[:, None], other=0.0)
        part = tl.dot(tile, weights[block].to(tl.float32).to(tile.dtype))
        sums += part * tl.load(scale + head * S_HEAD + block * S_K + first // 128 * S_N)
    to = y + lane.to(tl.int64)[:, None] * y_token + head * y_head + n[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), mask=(lane < tokens)[:, None])


def bmm_fp8(x_THk: Tensor, codes_HKN: Tensor, scales: Tensor, y_THn: Tensor, columns: int = 64) -> None:
    """y = x times codes · multipliers, for each head. codes: a view of any strides; scales: of its blocks."""
    (tokens, heads, inner), width = x_THk.shape, y_THn.shape[2]
    rows = min(max(triton.next_power_of_2(tokens), 16), 64)
    _bmm_fp8[heads, width // columns, triton.cdiv(tokens, rows)](
        x_THk, codes_HKN, scales, y_THn, tokens, *x_THk.stride()[:2], *y_THn.stride()[:2],
        *codes_HKN.stride(), *scales.stride(), inner, rows, columns, **launch_config(y_THn, 4),
    )  # fmt: skip


class Absorption:
    """W_UK or W_UV of a layer as a checkpoint in FP8 stores it, and in bf16, as absorption multiplies by it now."""

    def __init__(self, heads: int, is_key: bool) -> None:
        codes = torch.randint(0, 256, (heads, 128, 512), device=DEVICE, dtype=torch.uint8).bitwise_and_(0xBF)
        codes, scales = codes.view(torch.float8_e4m3fn), torch.rand(heads, 1, 4, device=DEVICE) * 0.02
        wide = codes.double() * scales.double().repeat_interleave(128, 2)
        # [H, k, n]: W_UK as it is, W_UV stored [H, v, r]
        views = (codes, scales, wide) if is_key else (x.transpose(1, 2) for x in (codes, scales, wide))
        self.codes, self.scales, self.wide = views
        self.weight = self.wide.to(torch.bfloat16) if is_key else wide.to(torch.bfloat16).transpose(1, 2)


def absorption(table: Table, quick: bool, heads: int, tokens: int) -> None:
    """The two products with kv_b around attention: by the library, by own kernels, and on codes, each with its error
    against float64.
    """
    layers = -(-BEYOND_L2 // (heads << 16))
    for is_key, name in ((True, "q_nope x W_UK"), (False, "out x W_UV")):
        given = [Absorption(heads, is_key) for _ in range(max(layers, 2))]
        x = random(tokens, heads, 128 if is_key else 512)
        y = random(tokens, heads, 512 if is_key else 128)
        exact = torch.bmm(x.transpose(0, 1).double(), given[0].wide).transpose(0, 1)

        def bmm(w: Absorption, x: Tensor = x, y: Tensor = y) -> Tensor:
            torch.bmm(x.transpose(0, 1), w.weight, out=y.transpose(0, 1))
            return y

        def own(w: Absorption, x: Tensor = x, y: Tensor = y) -> Tensor:
            return mla.up(x, w.weight).view_as(y)

        def fp8(w: Absorption, columns: int, x: Tensor = x, y: Tensor = y) -> Tensor:
            bmm_fp8(x, w.codes, w.scales, y, columns)
            return y

        ways: dict[str, Callable[[Absorption], Tensor]] = {"bmm": bmm} | ({} if is_key else {"own": own})
        ways |= {f"fp8, {columns} columns": functools.partial(fp8, columns=columns) for columns in (32, 64, 128)}
        for way, call in ways.items():
            bytes_ = heads * (1 if "fp8" in way else 2) << 16
            title, flops = f"{name}, {heads} heads, {tokens} tokens, {way}", 2 * tokens * heads << 16
            table.add(title, lambda call=call, given=given: [functools.partial(call, w) for w in given], bytes_, flops)
            if "us" in table.rows[-1]:
                error = float((call(given[0]).double() - exact).abs().max() / exact.abs().max())
                table.rows[-1]["error"] = error
                print(f"{'':70s} error {error:.2e}", flush=True)


def fa3_prefill(table: Table, quick: bool, heads: int, rows: int, tokens: int) -> None:
    if not fa3.available():
        print("fa3_fwd is not installed")
        return
    query, kv, latents = (
        random(rows * tokens, heads, 192),
        random(rows * tokens, heads, 256),
        random(rows * tokens, 576),
    )
    starts = counting(rows, tokens)
    ragged = RaggedRows(starts, starts, tokens, tokens)
    whole = torch.cat((kv[..., :128], latents[:, None, 512:].expand(-1, heads, -1)), -1)

    uk, uv = random(heads, 128, 512) * 0.05, (random(heads, 128, 512) * 0.05).transpose(1, 2)

    def decompressed(backend: str) -> object:
        return load_entry(PREFILL[backend].mla)(query, latents, uk, uv, ragged, scale=0.07)

    def joined() -> object:
        return fa3.prefill(query, whole, kv[..., 128:], ragged, scale=0.07)

    name, flops = f"fa3 prefill 192/128, {heads} heads, {rows} x {tokens}", rows * tokens * tokens * heads * 320
    table.add(name, lambda: [joined], 0, flops)
    flops += 2 * rows * tokens * heads * 256 * 512
    for backend in ("triton", "fa3"):
        whole_name = f"{backend} prefill from latents, {heads} heads, {rows} x {tokens}"
        table.add(whole_name, lambda backend=backend: [functools.partial(decompressed, backend)], 0, flops)


def library_checks() -> Rows:
    """The start-up self-checks of the libraries that are installed."""
    rows = Rows()
    for name, wanted, check in (
        ("fa3 192/128", fa3.available, lambda device: mla_fa3.check(device, CheckCase())),
        ("fa3 128", fa3.available, lambda device: fa3.check(device, CheckCase())),
        ("flashmla 16", flash_mla.available, lambda device: flash_mla.check(device, CheckCase(heads=16))),
        ("flashmla 128", flash_mla.available, lambda device: flash_mla.check(device, CheckCase(heads=128))),
    ):
        try:
            verdict = "not installed" if not wanted() else check(DEVICE) or "ok"
        except FAILURES as error:
            verdict = f"FAILED {error}"
        rows.append({"name": name, "verdict": verdict})
        print(f"{name:30s} {verdict}", flush=True)
    return rows


PARTS: dict[str, tuple[tuple[Callable[..., None], tuple[tuple[int, ...], ...]], ...]] = {
    "write": (
        (mla_absorb, ((16, 1), (16, 8), (16, 32), (128, 1), (128, 32))),
        (mla_write, ((16, 1), (16, 128), (128, 128), (16, 8192))),
        (gqa_write, ((1,), (256,), (8192,))),
    ),
    "mla": (
        (mla_decode, tuple((16, 1024, rows) for rows in (1, 8, 32, 128)) + ((16, 4096, 1), (16, 4096, 32))),
        (mla_decode, tuple((128, 1024, rows) for rows in (1, 32, 128)) + ((128, 4096, 1), (128, 4096, 64))),
    ),
    "prefill": (
        (mla_prefill, ((16, 1, 1024), (16, 1, 8192), (16, 8, 1024), (128, 1, 1024), (128, 1, 8192), (128, 8, 1024))),
        (gqa_prefill, ((28, 4, 1, 1024), (28, 4, 1, 8192), (28, 4, 8, 1024))),
    ),
    "crossover": tuple(
        (crossover, tuple((heads, context, rows) for rows in (1, 4, 8, 16, 32, 64, 128, 256)))
        for heads in (16, 64, 128)
        for context in (1024, 4096, 16384)
    ),
    "absorb": ((absorption, tuple((heads, tokens) for heads in (16, 128) for tokens in (1, 8, 32, 128, 256))),),
    "gqa": (
        (gqa_decode, tuple((28, 4, 1024, rows) for rows in (1, 64, 256)) + ((64, 8, 1024, 32), (28, 4, 4096, 32))),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the chosen tiles only")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--no-check", action="store_true", help="only time")
    asked = parser.parse_args()
    began = time.perf_counter()
    checked = Rows() if asked.no_check else correct() + library_checks()
    print(f"checked in {time.perf_counter() - began:.0f} s")
    table = Table(ceilings())
    print({name: f"{rate * 1e-12:.2f} T/s" for name, rate in table.rates.items()})
    for name in asked.only.split(","):
        for part, shapes in PARTS[name]:
            for shape in shapes:
                part(table, asked.quick, *shape)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name()}
    path = Path(os.environ.get("OUT", ".")) / "attention.json"
    path.write_text(json.dumps({**versions, "rates": table.rates, "cases": checked, "rows": table.rows}, indent=1))
    print(f"{time.perf_counter() - began:.0f} s in all; wrote {path.name}")


if __name__ == "__main__":
    main()
