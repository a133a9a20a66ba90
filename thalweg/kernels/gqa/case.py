"""Cases of grouped-query attention: one and several query heads for a key head, decode and prefill; gathered, and over
pages.
"""

from __future__ import annotations

from typing import Any, Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, size, tolerance_of
from thalweg.kernels.gqa import ext as fa3
from thalweg.kernels.gqa.ref import attend
from thalweg.kernels.launch import triton_available
from thalweg.kernels.mla.case import PAGE, pages_of, poisoned, quantized

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
            reach = torch.arange(keys) <= (
                keys - queries - torch.arange(rows)[:, None] + torch.arange(queries)
            ).unsqueeze(-1)
            bias = torch.zeros(reach.shape).masked_fill(~reach, -torch.inf)
            k, v = (t.double().repeat_interleave(heads // kv_heads, 2) for t in (key, value))
            scores = torch.einsum("rqhd,rshd->rhqs", q.double(), k) * dim**-0.5 + bias.double().unsqueeze(1)
            yield KernelCase(
                name=f"{rows} rows, {queries} queries, {heads}/{kv_heads} heads, {keys} keys, {dtype}",
                inputs={"q_RqHd": q, "key_RSKd": key, "value_RSKd": value, "bias_RqS": bias},
                exact=(torch.einsum("rhqs,rshd->rqhd", scores.softmax(-1), v),),
                tolerance=tolerance_of(dtype),
                flops=4 * heads * dim * int(reach.sum()),
                bytes=size(q, key, value),
            )


def run(q_RqHd: Tensor, key_RSKd: Tensor, value_RSKd: Tensor, bias_RqS: Tensor) -> tuple[Tensor, ...]:
    return (attend(q_RqHd, key_RSKd, value_RSKd, bias_RqS),)


BACKENDS = {"ref": run}


def paged_cases(generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Iterator[KernelCase]:
    """Decode where `splits` is given, prefill where `starts_R1` is. exact: out [T, H, d], of decode also LSE [T, H]."""
    for heads, kv_heads, dim, queries, contexts, splits, fp8, fixed in (
        (28, 4, 128, (1, 1, 1), (1, 65, 1000), 1, False, False),
        (28, 4, 128, (1, 1, 1), (1, 65, 1000), 4, False, False),
        (64, 8, 128, (3, 3), (300, 129), 2, False, False),
        (14, 2, 64, (2, 2), (1500, 129), 32, False, True),
        (32, 2, 128, (4,), (300,), 2, False, False),
        (28, 4, 128, (1, 1, 1), (1, 65, 1000), 3, True, False),
        (28, 4, 128, (200, 1, 64), (200, 70, 190), 0, False, False),
        (14, 2, 64, (300,), (1000,), 0, False, False),
        (4, 4, 256, (130,), (130,), 0, False, False),
        (28, 4, 128, (200, 5), (200, 300), 0, True, False),
    ):
        table, pages = pages_of(generator, contexts)
        key, value = (
            poisoned(normal(generator, pages, PAGE, kv_heads, dim), table, contexts).to(dtype) for _ in range(2)
        )
        inputs: dict[str, Any] = {"key_PSKd": key, "value_PSKd": value}
        if fp8:
            inputs["key_PSKd"], inputs["key_scale"] = quantized(key.float())
            inputs["value_PSKd"], inputs["value_scale"] = quantized(value.float())
            key = inputs["key_PSKd"].float() * inputs["key_scale"]
            value = inputs["value_PSKd"].float() * inputs["value_scale"]
        q = normal(generator, sum(queries), heads, dim, dtype=dtype)
        rows = [row for row, query in enumerate(queries) for _ in range(query)]
        spans = zip(queries, contexts, strict=True)
        positions = torch.cat([torch.arange(context - query, context).clamp_min(0) for query, context in spans])
        out, lse = torch.empty(len(q), heads, dim, dtype=torch.float64), torch.empty(len(q), heads, dtype=torch.float64)
        for token, (row, position) in enumerate(zip(rows, positions.tolist(), strict=True)):
            own = [x[table[row].long()].flatten(0, 1)[: position + 1].double() for x in (key, value)]
            k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in own)
            scores = torch.einsum("hd,shd->hs", q[token].double(), k) * dim**-0.5
            out[token], lse[token] = torch.einsum("hs,shd->hd", scores.softmax(-1), v), scores.logsumexp(-1)
        if splits:
            inputs |= {"splits": splits, "query": queries[0], "fixed": fixed}
        else:
            starts = torch.tensor((0, *queries)).cumsum(0).to(torch.int32)
            inputs |= {"starts_R1": starts, "max_query": max(queries)}
        kind = f"{splits} splits" if splits else "prefill"
        yield KernelCase(
            name=(
                f"{kind}, {heads}/{kv_heads} heads of {dim}, {queries} of {contexts}"
                f" tokens{', e4m3' * fp8}{', fixed' * fixed}"
            ),
            inputs={"query_THd": q, "table_RL": table, "positions_T": positions, "scale": dim**-0.5, **inputs},
            exact=(out, lse) if splits else (out,),
            tolerance=tolerance_of(dtype),
            flops=4 * heads * dim * int(positions.sum() + len(positions)),
            bytes=sum(contexts) * kv_heads * dim * (inputs["key_PSKd"].itemsize * 2) + size(q),
        )


def run_paged(**inputs: Any) -> tuple[Tensor, ...]:
    """Own kernels."""
    from thalweg.kernels.gqa import triton

    if "starts_R1" in inputs:
        return (triton.prefill(**inputs),)
    partial, lse = triton.decode(**inputs)
    return triton.merge(partial, lse, inputs["query_THd"].dtype), lse.logsumexp(-1)


PAGED: dict[str, Run] = {"triton": run_paged} if triton_available() else {}


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for name, heads, kv_heads, dim, rows, context in SHAPES[device.type]:
        what = f"decode, {rows} x {context} tokens" if rows else f"prefill, {context} tokens"
        yield _sized(
            f"{name} {what}, {heads}/{kv_heads} heads", heads, kv_heads, dim, rows, context, device.type == "cuda"
        )


def _sized(name: str, heads: int, kv_heads: int, dim: int, rows: int, context: int, gpu: bool) -> TimedCase:
    """Over pages. One causal prompt where rows is 0."""
    dtype, many = torch.bfloat16 if gpu else torch.float32, max(rows, 1)
    tokens = rows or context

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        device, pages = generator.device, many * context // PAGE
        order = torch.randperm(pages, generator=generator, device=device).to(torch.int32) + 1
        positions = torch.full((rows,), context - 1, device=device) if rows else torch.arange(context, device=device)
        key, value = (draw_tensor(generator, pages + 1, PAGE, kv_heads, dim, dtype=dtype) for _ in range(2))
        return {
            "query_THd": draw_tensor(generator, tokens, heads, dim, dtype=dtype), "key_PSKd": key, "value_PSKd": value,
            "table_RL": order.view(many, -1), "positions_T": positions,
        }  # fmt: skip

    def gathered(plane_PSKd: Tensor, table_RL: Tensor) -> Tensor:
        return plane_PSKd[table_RL.long()].flatten(1, 2)

    def by_ref(
        query_THd: Tensor, key_PSKd: Tensor, value_PSKd: Tensor, table_RL: Tensor, positions_T: Tensor
    ) -> tuple[Tensor, ...]:
        key, value = gathered(key_PSKd, table_RL), gathered(value_PSKd, table_RL)
        unseen = torch.arange(context, device=key.device) > positions_T.view(many, -1, 1)
        bias = torch.zeros(unseen.shape, device=key.device).masked_fill_(unseen, -torch.inf)
        return (attend(query_THd.view(many, -1, heads, dim), key, value, bias).reshape(-1, heads, dim),)

    def by_triton(query_THd: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
        from thalweg.kernels.gqa import triton

        if rows:
            splits = triton.splits_for(rows, heads, kv_heads, context)
            return run_paged(query_THd=query_THd, **given, scale=dim**-0.5, splits=splits)[:1]
        starts = torch.arange(2, device=query_THd.device, dtype=torch.int32) * context
        return run_paged(query_THd=query_THd, **given, scale=dim**-0.5, starts_R1=starts, max_query=context)

    def by_fa3(
        query_THd: Tensor, key_PSKd: Tensor, value_PSKd: Tensor, table_RL: Tensor, positions_T: Tensor
    ) -> tuple[Tensor, ...]:
        """Of keys and values side by side, which a prompt without cached context has; taken as they lie."""
        starts = torch.arange(2, device=query_THd.device, dtype=torch.int32) * context
        key, value = (gathered(plane, table_RL).flatten(0, 1) for plane in (key_PSKd, value_PSKd))
        return fa3.prefill(
            query_THd, key, value, starts, starts, max_query=context, max_context=context, scale=dim**-0.5
        )[:1]

    backends: dict[str, Run] = {"ref": by_ref}
    if gpu and PAGED:
        backends["triton"] = by_triton
    if gpu and not rows and fa3.available():
        backends["fa3"] = by_fa3
    pairs = rows * context if rows else context * (context + 1) // 2
    moved = (2 * many * context * kv_heads + 2 * tokens * heads) * dim * dtype.itemsize
    math = "bf16" if gpu else "float32"
    return TimedCase(name, draw, backends, lambda given: (4 * pairs * heads * dim, moved), math, 2e-2 if gpu else 1e-4)
