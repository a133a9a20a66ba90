"""Cases of native sparse attention: 1 to 64 query heads of a key head, keys wider than values, rows that end a page or
begin one, choices of less than what is always chosen and of more than there is, with and without a window.

A case stores its tokens first. Blocks of nearly equal weight, between which rounding would choose, are drawn again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.attend.args import QueryRows, RowLengths
from thalweg.kernels.attend.case import exact_attention, last_positions, page_table, paged_plane, row_tokens
from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, tolerance_of, with_triton
from thalweg.kernels.launch import triton_available
from thalweg.kernels.nsa import ref
from thalweg.kernels.nsa.ref import PAGE, NsaConfig, NsaPlanes

GAP = 1e-4  # the smallest relative gap of weights between a chosen block and one that is not
STEP = 0.25  # between the levels of blocks, in the logarithm of their weights
NEW = "key_TKd", "value_TKv"
Shape = tuple[int, int, int, int]  # query heads, key heads, dims of keys and of values
# (name, shape, rows of one token or 0 for a prompt, tokens of context, at most 256 pages)
SIZES: dict[str, tuple[tuple[str, Shape, int, int], ...]] = {
    "cpu": (("small", (32, 2, 64, 64), 2, 1024), ("small", (32, 2, 64, 64), 0, 256)),
    "cuda": (
        ("nsa-27b", (64, 4, 192, 128), 1, 16384),
        ("nsa-27b", (64, 4, 192, 128), 64, 8192),
        ("nsa-27b", (64, 4, 192, 128), 0, 4096),
    ),
}


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for shape, queries, contexts, topk, window in (
        ((4, 2, 32, 32), (1, 1, 1), (1, 65, 700), 4, 100),
        ((16, 1, 64, 64), (3, 2), (64, 513), 3, 0),
        ((28, 4, 64, 64), (66, 1), (66, 460), 5, 64),
        ((64, 1, 48, 16), (2, 1), (640, 127), 16, 1),
        ((2, 2, 128, 128), (4, 1), (257, 64), 2, 512),
        ((32, 2, 192, 128), (1, 2), (900, 130), 6, 512),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            yield _case(
                generator, shape, RowLengths(queries, contexts), NsaConfig(topk, window, shape[2] ** -0.5), dtype
            )


def _case(
    generator: torch.Generator, shape: Shape, lengths: RowLengths, config: NsaConfig, dtype: torch.dtype
) -> KernelCase:
    gap = 0.0
    while gap < GAP:
        inputs, contexts = _draw(generator, shape, lengths, dtype)
        rows = zip(inputs["rows_T"].tolist(), inputs["positions_T"].tolist(), strict=True)
        tokens = ((contexts[row][0][: position + 1], contexts[row][1][: position + 1]) for row, position in rows)
        results = [
            exact_token(query, gates, key, value, config)
            for query, gates, (key, value) in zip(inputs["query_THd"], inputs["gates_TH3"], tokens, strict=True)
        ]
        gap = min(each for _, each in results)
    return KernelCase(
        name=f"{shape[0]}/{shape[1]} heads of {shape[2]}/{shape[3]}, {lengths.queries} of {lengths.contexts} tokens, "
        f"{config.topk} blocks, window {config.window}, {dtype}",
        inputs={**inputs, "config": config, "max_kv_len": max(lengths.contexts)},
        exact=(torch.stack([out for out, _ in results]),),
        tolerance=tolerance_of(dtype),
    )


def _draw(
    generator: torch.Generator, shape: Shape, lengths: RowLengths, dtype: torch.dtype
) -> tuple[Inputs, list[tuple[Tensor, ...]]]:
    """Inputs of `run`, and the keys and values of each row. Planes lack the step's tokens; what they pool is large."""
    heads, kv_heads, *dims = shape
    table, pages = page_table(generator, lengths.contexts)
    positions, rows = last_positions(lengths), torch.arange(len(table)).repeat_interleave(torch.tensor(lengths.queries))
    write = table[rows, positions // PAGE].long() * PAGE + positions % PAGE
    old = torch.cat([table[row, : (s - q) // PAGE] for row, (q, s) in enumerate(zip(*lengths, strict=True))]).long()
    planes, new, contexts = list[Tensor](), list[Tensor](), list[list[Tensor]]()
    for dim in dims:
        plane = paged_plane(generator, table, lengths.contexts, kv_heads, dim, dtype=torch.float32)
        plane = (plane + normal(generator, pages, 1, kv_heads, dim)).to(dtype)  # blocks differ
        contexts.append(row_tokens(plane, table, lengths.contexts))
        new.append(plane.flatten(0, 1)[write])
        plane.flatten(0, 1)[write] = 1e3
        pooled = torch.full((pages, kv_heads, dim), 1e3, dtype=dtype)
        pooled[old] = plane[old].float().mean(1).to(dtype)
        planes += [plane, pooled]
    tensors = dict(zip(NEW + NsaPlanes._fields, (*new, *planes[::2], *planes[1::2]), strict=True))
    tensors["query_THd"] = normal(generator, len(rows), heads, dims[0], dtype=dtype)
    tensors["gates_TH3"] = normal(generator, len(rows), heads, 3).sigmoid().to(dtype)
    places = {"rows_T": rows.to(torch.int32), "table_RL": table, "positions_T": positions, "write_T": write}
    return tensors | places, list(zip(*contexts, strict=True))


def exact_token(
    query_Hd: Tensor, gates_H3: Tensor, key_SKd: Tensor, value_SKv: Tensor, config: NsaConfig
) -> tuple[Tensor, float]:
    """The definition for the last token of a context, in float64: → [H, v], and the smallest relative gap of weights
    between a chosen block and one that is not.
    """
    (seen, kv_heads, _), outs, gap = key_SKd.shape, list[Tensor](), float("inf")
    own, full = (seen - 1) // PAGE, seen // PAGE
    pooled = [x[: full * PAGE].float().view(full, PAGE, *x.shape[1:]).mean(1).to(x.dtype) for x in (key_SKd, value_SKv)]
    for head, query_Gd in enumerate(query_Hd.view(kv_heads, -1, query_Hd.shape[1])):
        weights = (query_Gd.double() @ pooled[0][:, head].double().t() * config.scale).softmax(1).mean(0).tolist()
        forced = sorted({own, max(own - 1, 0), 0}, reverse=True)
        others = sorted(set(range(own)) - set(forced), key=lambda block: (weights[block], block), reverse=True)
        if len(forced) < config.topk < own + 1:
            last, beyond = (weights[others[config.topk - len(forced) + i]] for i in (-1, 0))
            gap = min(gap, (last - beyond) / last)
        chosen = [torch.arange(b * PAGE, min(b * PAGE + PAGE, seen)) for b in (forced + others)[: config.topk]]
        near = torch.arange(max(seen - config.window, 0), seen)
        for keys, values, index in (
            (*pooled, torch.arange(full)),
            (key_SKd, value_SKv, torch.cat(chosen)),
            (key_SKd, value_SKv, near),
        ):
            key, value = (x[index, head : head + 1] for x in (keys, values))
            outs.append(exact_attention(query_Gd[None], key, value, torch.zeros(1, len(index)), config.scale)[0][0])
    out_K3Gv = torch.stack(outs).view(kv_heads, 3, -1, value_SKv.shape[2])
    return (out_K3Gv.transpose(1, 2).flatten(0, 1) * gates_H3.double()[..., None]).sum(1), gap


def run(
    query_THd: Tensor,
    gates_TH3: Tensor,
    write_T: Tensor,
    config: NsaConfig,
    max_kv_len: int,
    kernels: Any = ref,
    **tensors: Tensor,
) -> tuple[Tensor, ...]:
    """Stores the step's tokens and attends. kernels: the module that does it. tensors: the fields of the arguments."""
    planes = NsaPlanes(*(tensors[field] for field in NsaPlanes._fields))
    rows = QueryRows(*(tensors[field] for field in ("rows_T", "table_RL", "positions_T")))
    kernels.write(*(tensors[name] for name in NEW), write_T, planes)
    return (kernels.attend(query_THd, gates_TH3, planes, rows, config, max_kv_len),)


def run_triton(**inputs: Any) -> tuple[Tensor, ...]:
    from thalweg.kernels.nsa import triton

    return run(**inputs, kernels=triton)


BACKENDS = with_triton(run, run_triton)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for name, shape, rows, context in SIZES[device.type]:
        kind = f"decode, {rows} x {context} tokens" if rows else f"prefill, {context} tokens"
        yield _timed(f"{name} {kind}, {shape[0]}/{shape[1]} heads", shape, rows, context, device.type == "cuda")


def _timed(name: str, shape: Shape, rows: int, context: int, gpu: bool) -> TimedCase:
    """One prompt where rows is 0. Blocks have levels that all queries weigh alike, far enough from one another that
    rounding changes no choice.
    """
    heads, kv_heads, *dims = shape
    many, each, dtype = max(rows, 1), 1 if rows else context, torch.bfloat16 if gpu else torch.float32
    pages, tokens = many * context // PAGE, many * each
    config = NsaConfig(16 if gpu else 4, 512 if gpu else 100, dims[0] ** -0.5)

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        device = generator.device
        table = torch.randperm(pages, generator=generator, device=device).to(torch.int32).view(many, -1) + 1
        positions = torch.arange(context - each, context, device=device).repeat(many)
        row = torch.arange(many, device=device).repeat_interleave(each)
        write = table[row, positions // PAGE].long() * PAGE + positions % PAGE
        planes = [draw_tensor(generator, pages + 1, PAGE, kv_heads, dim, dtype=dtype) for dim in dims]
        levels = torch.rand(many * kv_heads, context // PAGE, generator=generator, device=device).argsort(1)
        planes[0][table.long(), :, :, 0] = levels.view(many, kv_heads, 1, -1).permute(0, 3, 2, 1).to(dtype)
        query = draw_tensor(generator, tokens, heads, dims[0], dtype=dtype)
        query[..., 0] = STEP / config.scale
        new = (plane.flatten(0, 1)[write] for plane in planes)
        pooled = (plane.float().mean(1).to(dtype) for plane in planes)
        return {
            "query_THd": query, "gates_TH3": draw_tensor(generator, tokens, heads, 3, dtype=dtype).sigmoid(),
            **dict(zip(NEW + NsaPlanes._fields, (*new, *planes, *pooled), strict=True)), "rows_T": row.to(torch.int32),
            "table_RL": table, "positions_T": positions, "write_T": write, "config": config, "max_kv_len": context,
        }  # fmt: skip

    backends: dict[str, Run] = {"ref": run}
    if gpu and triton_available():
        backends["triton"] = run_triton
    seen = range(context - each, context)  # positions of a row's tokens
    keys = sum(min(config.topk * PAGE, p + 1) + min(config.window, p + 1) + (p + 1) // PAGE for p in seen)
    # the window and the chosen blocks share the token's own block and the one before
    reads = context if not rows else min(config.topk * PAGE + max(config.window - 2 * PAGE, 0), context)
    width = kv_heads * sum(dims)
    moved = (many * (reads + context // PAGE + each) * width + tokens * heads * (sum(dims) + 3)) * dtype.itemsize
    math, tolerance = ("bf16", 2e-2) if gpu else ("float32", 1e-4)
    return TimedCase(name, draw, backends, lambda inputs: (2 * many * heads * sum(dims) * keys, moved), math, tolerance)
