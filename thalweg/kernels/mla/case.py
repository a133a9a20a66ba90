"""Cases of latent attention: absorbed and expanded from the same inputs must agree, masked keys must not count.

`cases` have gathered keys; `decode_cases` and `prefill_cases` have a model's dims and the layouts that a GPU's kernels
read.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.attend import ref
from thalweg.kernels.attend.args import DecodeRows, LatentPlane, RaggedRows, RowLengths
from thalweg.kernels.attend.case import (
    PAGE,
    causal_bias,
    exact_attention,
    exact_rows,
    last_positions,
    page_table,
    paged_plane,
    quantized,
    row_tokens,
    starts_of,
)
from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, tolerance_of
from thalweg.kernels.gqa import fa3
from thalweg.kernels.launch import triton_available

RANK, ROPE, NOPE, V, SCALE = 512, 64, 128, 128, 192**-0.5  # of the models
# of models: (name, heads, rows of one token, tokens of context)
DECODES = {
    "cpu": (("tiny", 8, 1, 1024), ("tiny", 8, 16, 1024)),
    "cuda": (("v2-lite", 16, 1, 4096), ("v2-lite", 16, 64, 4096), ("v3", 128, 1, 4096), ("v3", 128, 64, 4096)),
}
PREFILLS = {"cpu": (), "cuda": (("v2-lite", 16, 4096), ("v3", 128, 2048))}  # (name, heads, tokens)


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    shapes = ((1, 4, 64, 32, 16, 24, 20), (5, 2, 130, 40, 8, 16, 12), (70, 8, 192, 64, 16, 32, 32))
    for queries, heads, keys, rank, rope, nope, v in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            q = normal(generator, queries, heads, nope + rope, dtype=dtype)
            kv = normal(generator, keys, rank + rope, dtype=dtype)
            uk, uv = (normal(generator, heads, *dims, dtype=dtype) * rank**-0.5 for dims in ((nope, rank), (rank, v)))
            bias, scale = causal_bias(queries, keys), (nope + rope) ** -0.5
            key = torch.einsum("kr,hnr->khn", kv[:, :rank].double(), uk.double())
            key = torch.cat([key, kv[:, None, rank:].expand(-1, heads, -1)], -1)
            value = torch.einsum("kr,hrv->khv", kv[:, :rank].double(), uv.double())
            exact = exact_attention(q, key, value, bias, scale)[0]
            yield KernelCase(
                name=f"{queries} queries, {heads} heads, {keys} keys, {dtype}",
                inputs={"q_NHd": q, "kv_KD": kv, "uk_HnR": uk, "uv_HRv": uv, "bias_NK": bias, "scale": scale},
                exact=(exact, exact),
                tolerance=tolerance_of(dtype),
            )


def run(
    q_NHd: Tensor, kv_KD: Tensor, uk_HnR: Tensor, uv_HRv: Tensor, bias_NK: Tensor, scale: float
) -> tuple[Tensor, ...]:
    (queries, heads, _), (_, nope, rank) = q_NHd.shape, uk_HnR.shape
    q = torch.cat([torch.einsum("nhd,hdr->nhr", q_NHd[..., :nope], uk_HnR), q_NHd[..., nope:]], -1)
    bias, kv = bias_NK.repeat_interleave(heads, 0).unsqueeze(0), kv_KD.unsqueeze(0)
    u = ref.attend(q.view(1, queries * heads, -1), kv, kv[..., :rank], bias, scale).view(queries, heads, rank)
    expanded = ref.attend(q_NHd.transpose(0, 1), *ref.expand_latents(kv_KD, uk_HnR, uv_HRv), bias_NK, scale)
    return torch.einsum("nhr,hrv->nhv", u, uv_HRv), expanded.transpose(0, 1)


BACKENDS = {"ref": run}


def decode_cases(generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Iterator[KernelCase]:
    """exact: merged sums [T, H, r], their LSE [T, H], and the sums times W_UV [T, H, v]."""
    for heads, contexts, query, splits, fp8, fixed in (
        (16, (1, 64, 65, 1000), 1, 1, False, False),
        (16, (1, 64, 65, 1000), 1, 5, False, False),
        (16, (700, 130), 2, 3, False, False),
        (128, (300, 1, 190), 1, 2, False, False),
        (128, (513,), 3, 1, False, False),
        (20, (90, 200), 1, 4, False, False),
        (16, (1000, 77), 2, 32, False, True),
        (128, (600, 1500), 1, 32, False, True),
        (16, (1, 64, 65, 1000), 1, 3, True, False),
        (128, (300, 190), 1, 2, True, False),
    ):
        lengths, (table, _) = RowLengths((query,) * len(contexts), contexts), page_table(generator, contexts)
        plane = paged_plane(generator, table, contexts, RANK + ROPE, dtype=dtype)
        latents = LatentPlane(*quantized(plane.float())) if fp8 else LatentPlane(plane)
        if latents.scale is not None:
            plane = latents.paged_PSD.float() * latents.scale
        q = normal(generator, len(contexts) * query, heads, RANK + ROPE, dtype=dtype)
        uv = (normal(generator, heads, RANK, V) * RANK**-0.5).to(dtype)
        keys = [kv.unsqueeze(1) for kv in row_tokens(plane, table, contexts)]
        exact, lse = exact_rows(q, keys, [key[..., :RANK] for key in keys], lengths, SCALE)
        kind = f"{', e4m3' * fp8}{', fixed' * fixed}"
        yield KernelCase(
            name=f"{heads} heads, contexts {contexts}, {query} queries, {splits} splits{kind}",
            inputs={
                "q_THD": q, "latents": latents, "rows": DecodeRows(table, last_positions(lengths), query), "uv_HRv": uv,
                "splits": splits, "fixed": fixed,
            },
            exact=(exact, lse, torch.einsum("thr,hrv->thv", exact, uv.double()).flatten(1)),
            tolerance=tolerance_of(dtype),
        )  # fmt: skip


def run_decode(
    q_THD: Tensor, latents: LatentPlane, rows: DecodeRows, uv_HRv: Tensor, splits: int, fixed: bool
) -> tuple[Tensor, ...]:
    """The project's own kernels: split-KV decode, then both merges."""
    from thalweg.kernels.attend.triton import merge_with_lse
    from thalweg.kernels.mla import triton

    partial, lse = triton.decode(q_THD, latents, rows, scale=SCALE, rank=RANK, splits=splits, fixed=fixed)
    return *merge_with_lse(partial, lse, q_THD.dtype), triton.merge_up(partial, lse, uv_HRv)


def prefill_cases(generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Iterator[KernelCase]:
    """exact: out [T, H, v] and LSE [T, H]."""
    for heads, queries, contexts, causal in (
        (16, (200,), (200,), True),
        (2, (130, 1, 64, 5), (190, 70, 64, 133), True),
        (4, (300,), (1000,), True),
        (4, (129, 7), (64, 300), False),
    ):
        q = normal(generator, sum(queries), heads, NOPE + ROPE, dtype=dtype)
        kv, rope = (normal(generator, sum(contexts), *dims, dtype=dtype) for dims in ((heads, NOPE + V), (ROPE,)))
        key, value = torch.cat((kv[..., :NOPE], rope[:, None].expand(-1, heads, -1)), -1), kv[..., NOPE:]
        keys, values = (torch.split(x, list(contexts)) for x in (key, value))
        yield KernelCase(
            name=f"prefill, {heads} heads, {queries} of {contexts} tokens{', causal' * causal}",
            inputs={
                "q_THq": q, "key_SHn": kv[..., :NOPE], "rope_Sc": rope, "value_SHv": value,
                "rows": RaggedRows(starts_of(queries), starts_of(contexts), max(queries), max(contexts), causal),
            },
            exact=exact_rows(q, keys, values, RowLengths(queries, contexts), SCALE, causal),
            tolerance=tolerance_of(dtype),
        )  # fmt: skip


def run_prefill(
    q_THq: Tensor, key_SHn: Tensor, rope_Sc: Tensor, value_SHv: Tensor, rows: RaggedRows
) -> tuple[Tensor, ...]:
    """The project's own kernel."""
    from thalweg.kernels.mla import triton

    return triton.prefill(q_THq, key_SHn, rope_Sc, value_SHv, rows, scale=SCALE)


DECODE: dict[str, Run] = {"triton": run_decode} if triton_available() else {}
PREFILL: dict[str, Run] = {"triton": run_prefill} if triton_available() else {}


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for name, heads, rows, context in DECODES[device.type]:
        yield _timed_decode(f"{name} decode, {heads} heads, {rows} x {context} tokens", heads, rows, context, device)
    for name, heads, tokens in PREFILLS[device.type]:
        yield _timed_prefill(f"{name} prefill, {heads} heads, {tokens} tokens", heads, tokens)


def _timed_decode(name: str, heads: int, rows: int, context: int, device: torch.device) -> TimedCase:
    """On a CPU in float32, of the bundled model's dims."""
    is_cpu = device.type == "cpu"
    rank, rope, dtype = (128, 16, torch.float32) if is_cpu else (RANK, ROPE, torch.bfloat16)

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        pages = rows * context // PAGE
        table = torch.randperm(pages, generator=generator, device=device).to(torch.int32).view(rows, -1) + 1
        return {
            "q": draw_tensor(generator, rows, heads, rank + rope, dtype=dtype),
            "latents": LatentPlane(draw_tensor(generator, pages + 1, PAGE, rank + rope, dtype=dtype)),
            "rows": DecodeRows(table, torch.full((rows,), context - 1, device=device)),
        }

    def gathered(latents: LatentPlane, rows: DecodeRows) -> tuple[Tensor, Tensor]:
        kv = latents.paged_PSD[rows.table_RL.long()].flatten(1, 2).float()
        return kv, kv[..., :rank]

    def by_ref(q: Tensor, latents: LatentPlane, rows: DecodeRows) -> tuple[Tensor, ...]:
        return (ref.attend(q.float(), *gathered(latents, rows), torch.zeros(1, 1, 1, device=device), SCALE),)

    def by_sdpa(q: Tensor, latents: LatentPlane, rows: DecodeRows) -> tuple[Tensor, ...]:
        return (torch.nn.functional.scaled_dot_product_attention(q, *gathered(latents, rows), scale=SCALE),)

    def by_triton(q: Tensor, latents: LatentPlane, rows: DecodeRows) -> tuple[Tensor, ...]:
        from thalweg.kernels.attend.triton import merge
        from thalweg.kernels.mla import triton

        splits = triton.splits_for(len(q), heads, context)
        return (merge(*triton.decode(q, latents, rows, scale=SCALE, rank=rank, splits=splits), q.dtype),)

    def by_flashmla(q: Tensor, latents: LatentPlane, rows: DecodeRows) -> tuple[Tensor, ...]:
        from thalweg.kernels.mla.backends import MlaShape
        from thalweg.kernels.mla.flashmla import FlashMlaDecode

        kernel = FlashMlaDecode(MlaShape(heads, rank, SCALE, False))
        return kernel.attend_with_lse(q, latents, rows, kernel.prepare(rows))[:1]

    backends: dict[str, Run] = {"ref": by_ref}
    if is_cpu:
        backends["sdpa"] = by_sdpa
    elif DECODE:
        from thalweg.kernels.mla import flashmla

        backends |= {"triton": by_triton} | ({"flashmla": by_flashmla} if flashmla.available() else {})
    cost = 2 * rows * heads * context * (2 * rank + rope), dtype.itemsize * rows * (rank + rope) * (context + heads)
    math, tolerance = ("float32", 1e-4) if is_cpu else ("bf16", tolerance_of(dtype))
    return TimedCase(name, draw, backends, lambda inputs: cost, math, tolerance)


def _timed_prefill(name: str, heads: int, tokens: int) -> TimedCase:
    """One causal prompt, keys and values expanded."""

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        kv = draw_tensor(generator, tokens, heads, NOPE + V)
        starts = torch.tensor((0, tokens), dtype=torch.int32, device=generator.device)
        return {
            "query": draw_tensor(generator, tokens, heads, NOPE + ROPE), "key": kv[..., :NOPE], "value": kv[..., NOPE:],
            "rope": draw_tensor(generator, tokens, ROPE), "rows": RaggedRows(starts, starts, tokens, tokens),
        }  # fmt: skip

    def whole(key: Tensor, rope: Tensor) -> Tensor:
        return torch.cat((key, rope.unsqueeze(1).expand(-1, heads, -1)), -1)

    def by_ref(query: Tensor, key: Tensor, value: Tensor, rope: Tensor, rows: RaggedRows) -> tuple[Tensor, ...]:
        q, k, v = (x.float().transpose(0, 1) for x in (query, whole(key, rope), value))
        return (ref.attend(q, k, v, causal_bias(tokens, tokens).to(q.device), SCALE).transpose(0, 1),)

    def by_triton(query: Tensor, key: Tensor, value: Tensor, rope: Tensor, rows: RaggedRows) -> tuple[Tensor, ...]:
        from thalweg.kernels.mla import triton

        return triton.prefill(query, key, rope, value, rows, scale=SCALE)[:1]

    def by_fa3(query: Tensor, key: Tensor, value: Tensor, rope: Tensor, rows: RaggedRows) -> tuple[Tensor, ...]:
        """With the keys put together, as a layer has to."""
        return fa3.prefill(query, whole(key, rope), value, rows, scale=SCALE)[:1]

    backends: dict[str, Run] = {"ref": by_ref}
    if PREFILL:
        backends["triton"] = by_triton
    if fa3.available():
        backends["fa3"] = by_fa3
    flops = tokens * (tokens + 1) * heads * (NOPE + ROPE + V)
    cost = flops, 2 * tokens * (heads * (2 * NOPE + ROPE + 2 * V) + ROPE)
    return TimedCase(name, draw, backends, lambda inputs: cost, "bf16", tolerance_of(torch.bfloat16))
