"""Cases of grouped-query attention: one and several query heads for a key head, decode and prefill; gathered, and over
pages.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.attend.args import DecodeRows, KvPlanes, PagedRows, RaggedRows, RowLengths
from thalweg.kernels.attend.case import (
    PAGE,
    exact_attention,
    exact_rows,
    last_positions,
    page_table,
    paged_plane,
    quantized,
    row_tokens,
    starts_of,
)
from thalweg.kernels.attend.ref import attend_grouped
from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, tolerance_of
from thalweg.kernels.gqa import fa3
from thalweg.kernels.launch import triton_available

# of models: (name, heads, key heads, dims, rows of one token or 0 for a prompt, tokens of context)
SHAPES = {
    "cpu": (("small", 8, 2, 64, 1, 1024), ("small", 8, 2, 64, 0, 256)),
    "cuda": (
        ("qwen2.5-7b", 28, 4, 128, 1, 4096),
        ("qwen2.5-7b", 28, 4, 128, 64, 4096),
        ("qwen2.5-7b", 28, 4, 128, 0, 4096),
    ),
}


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, queries, heads, kv_heads, keys, dim in (
        (3, 1, 4, 4, 64, 16),
        (2, 1, 8, 2, 192, 32),
        (1, 70, 6, 1, 128, 64),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            q = normal(generator, rows, queries, heads, dim, dtype=dtype)
            key, value = (normal(generator, rows, keys, kv_heads, dim, dtype=dtype) for _ in range(2))
            ends = keys - queries - torch.arange(rows)[:, None] + torch.arange(queries)
            bias = torch.zeros(rows, queries, keys).masked_fill(torch.arange(keys) > ends.unsqueeze(-1), -torch.inf)
            exact = [exact_attention(*row, dim**-0.5)[0] for row in zip(q, key, value, bias, strict=True)]
            yield KernelCase(
                name=f"{rows} rows, {queries} queries, {heads}/{kv_heads} heads, {keys} keys, {dtype}",
                inputs={"q_RqHd": q, "key_RSKd": key, "value_RSKd": value, "bias_RqS": bias},
                exact=(torch.stack(exact),),
                tolerance=tolerance_of(dtype),
            )


def run(q_RqHd: Tensor, key_RSKd: Tensor, value_RSKd: Tensor, bias_RqS: Tensor) -> tuple[Tensor, ...]:
    return (attend_grouped(q_RqHd, key_RSKd, value_RSKd, bias_RqS),)


BACKENDS = {"ref": run}


def paged_cases(generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Iterator[KernelCase]:
    """Cases with the dims of models."""
    for shape, queries, contexts, splits, fp8, fixed in (
        ((28, 4, 128), (1, 1, 1), (1, 65, 1000), 1, False, False),
        ((28, 4, 128), (1, 1, 1), (1, 65, 1000), 4, False, False),
        ((64, 8, 128), (3, 3), (300, 129), 2, False, False),
        ((14, 2, 64), (2, 2), (1500, 129), 32, False, True),
        ((32, 2, 128), (4,), (300,), 2, False, False),
        ((28, 4, 128), (1, 1, 1), (1, 65, 1000), 3, True, False),
        ((28, 4, 128), (200, 1, 64), (200, 70, 190), 0, False, False),
        ((14, 2, 64), (300,), (1000,), 0, False, False),
        ((4, 4, 256), (130,), (130,), 0, False, False),
        ((28, 4, 128), (200, 5), (200, 300), 0, True, False),
    ):
        yield paged_case(generator, shape, RowLengths(queries, contexts), splits, fp8, fixed, dtype)


def paged_case(
    generator: torch.Generator,
    shape: tuple[int, int, int],
    lengths: RowLengths,
    splits: int = 0,
    fp8: bool = False,
    fixed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> KernelCase:
    """Decode with `splits`, prefill where they are 0. exact: out [T, H, d], LSE [T, H]."""
    (heads, kv_heads, dim), (queries, contexts) = shape, lengths
    table, _ = page_table(generator, contexts)
    key, value = (paged_plane(generator, table, contexts, kv_heads, dim, dtype=dtype) for _ in range(2))
    kv = KvPlanes(key, value)
    if fp8:
        (key, key_scale), (value, value_scale) = (quantized(x.float()) for x in (key, value))
        kv = KvPlanes(key, value, key_scale, value_scale)
        key, value = key.float() * key_scale, value.float() * value_scale
    q = normal(generator, sum(queries), heads, dim, dtype=dtype)
    keys, values = (row_tokens(plane, table, contexts) for plane in (key, value))
    kind = f"{splits} splits" if splits else "prefill"
    kind = f"{kind}, {heads}/{kv_heads} heads of {dim}, {queries} of {contexts} tokens"
    rows = PagedRows(table, last_positions(lengths), starts_of(queries), max(queries))
    return KernelCase(
        name=f"{kind}{', e4m3' * fp8}{', fixed' * fixed}",
        inputs={"q_THd": q, "kv": kv, "rows": rows, "splits": splits, "fixed": fixed},
        exact=exact_rows(q, keys, values, lengths, dim**-0.5),
        tolerance=tolerance_of(dtype),
    )


def run_paged(q_THd: Tensor, kv: KvPlanes, rows: PagedRows, splits: int, fixed: bool) -> tuple[Tensor, ...]:
    """The project's own kernels."""
    from thalweg.kernels.attend.triton import merge_with_lse
    from thalweg.kernels.gqa import triton

    scale = q_THd.shape[2] ** -0.5
    if not splits:
        lse_TH = q_THd.new_empty(q_THd.shape[:2], dtype=torch.float32)
        return triton.prefill(q_THd, kv, rows, scale=scale, lse_TH=lse_TH), lse_TH
    decoded = DecodeRows(rows.table_RL, rows.positions_T, rows.max_query)
    return merge_with_lse(*triton.decode(q_THd, kv, decoded, scale=scale, splits=splits, fixed=fixed), q_THd.dtype)


PAGED: dict[str, Run] = {"triton": run_paged} if triton_available() else {}


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for name, *shape, rows, context in SHAPES[device.type]:
        kind = f"decode, {rows} x {context} tokens" if rows else f"prefill, {context} tokens"
        label = f"{name} {kind}, {shape[0]}/{shape[1]} heads"
        yield _timed(label, (shape[0], shape[1], shape[2]), rows, context, device.type == "cuda")


def _timed(name: str, shape: tuple[int, int, int], rows: int, context: int, gpu: bool) -> TimedCase:
    """Over pages. One causal prompt where rows is 0."""
    heads, kv_heads, dim = shape
    dtype, many, tokens = torch.bfloat16 if gpu else torch.float32, max(rows, 1), rows or context

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        device, pages = generator.device, many * context // PAGE
        table = torch.randperm(pages, generator=generator, device=device).to(torch.int32).view(many, -1) + 1
        positions = torch.full((rows,), context - 1, device=device) if rows else torch.arange(context, device=device)
        starts = torch.arange(2, device=device, dtype=torch.int32) * context
        planes = (draw_tensor(generator, pages + 1, PAGE, kv_heads, dim, dtype=dtype) for _ in range(2))
        paged = PagedRows(table, positions, starts, tokens // many)
        return {"q": draw_tensor(generator, tokens, heads, dim, dtype=dtype), "kv": KvPlanes(*planes), "paged": paged}

    def gathered(kv: KvPlanes, paged: PagedRows) -> list[Tensor]:
        return [plane[paged.table_RL.long()].flatten(1, 2) for plane in kv[:2]]

    def by_ref(q: Tensor, kv: KvPlanes, paged: PagedRows) -> tuple[Tensor, ...]:
        unseen = torch.arange(context, device=q.device) > paged.positions_T.view(many, -1, 1)
        bias = torch.zeros(unseen.shape, device=q.device).masked_fill_(unseen, -torch.inf)
        key, value = gathered(kv, paged)
        return (attend_grouped(q.view(many, -1, heads, dim), key, value, bias).reshape(-1, heads, dim),)

    def by_triton(q: Tensor, kv: KvPlanes, paged: PagedRows) -> tuple[Tensor, ...]:
        from thalweg.kernels.gqa.backends import GqaShape, TritonGqa

        kernel = TritonGqa(GqaShape(*shape))
        if not rows:
            return kernel.ragged(q, kv, paged, None)[:1]
        return kernel.decode(q, kv, DecodeRows(paged.table_RL, paged.positions_T, 1, context), None)[:1]

    def by_fa3(q: Tensor, kv: KvPlanes, paged: PagedRows) -> tuple[Tensor, ...]:
        """Reads contiguous keys and values, as a prompt without cached context does."""
        key, value = (x.flatten(0, 1) for x in gathered(kv, paged))
        ragged = RaggedRows(paged.starts_R1, paged.starts_R1, context, context)
        return fa3.prefill(q, key, value, ragged, scale=dim**-0.5)[:1]

    backends: dict[str, Run] = {"ref": by_ref}
    if gpu and PAGED:
        backends["triton"] = by_triton
    if gpu and not rows and fa3.available():
        backends["fa3"] = by_fa3
    pairs = rows * context if rows else context * (context + 1) // 2
    moved = (2 * many * context * kv_heads + 2 * tokens * heads) * dim * dtype.itemsize
    math, tolerance = ("bf16", 2e-2) if gpu else ("float32", 1e-4)
    return TimedCase(name, draw, backends, lambda inputs: (4 * pairs * heads * dim, moved), math, tolerance)
