"""Cases of latent attention: absorbed and decompressed from the same inputs must agree, masked keys must not count.

`cases` have gathered keys; `decode_cases` and `prefill_cases` have a model's dims and the layouts that a GPU's kernels
read: pages in any order, rows of unequal length, poison in everything that must not be read.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, size, tolerance_of
from thalweg.kernels.gqa import ext as fa3
from thalweg.kernels.launch import triton_available
from thalweg.kernels.mla import ext, ref

PAGE = 64
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
            uk, uv = (normal(generator, heads, *shape, dtype=dtype) * rank**-0.5 for shape in ((nope, rank), (rank, v)))
            reach = torch.arange(keys) <= (keys - queries + torch.arange(queries)).unsqueeze(1)
            bias, scale = torch.zeros(queries, keys).masked_fill(~reach, -torch.inf), (nope + rope) ** -0.5
            exact = _exact(q.double(), kv.double(), uk.double(), uv.double(), bias.double(), scale)
            yield KernelCase(
                name=f"{queries} queries, {heads} heads, {keys} keys, {dtype}",
                inputs={"q_NHd": q, "kv_KD": kv, "uk_HnR": uk, "uv_HRv": uv, "bias_NK": bias, "scale": scale},
                exact=(exact, exact),
                tolerance=tolerance_of(dtype),
                flops=2 * heads * int(reach.sum()) * (2 * rank + rope),
                bytes=size(q, kv, uk, uv),
            )


def _exact(q: Tensor, kv: Tensor, uk: Tensor, uv: Tensor, bias: Tensor, scale: float) -> Tensor:
    """[N, H, v]: keys and values of every head, softmax, sum."""
    heads, nope, rank = uk.shape
    key = torch.cat([torch.einsum("kr,hnr->khn", kv[:, :rank], uk), kv[:, None, rank:].expand(-1, heads, -1)], -1)
    scores = torch.einsum("nhd,khd->nhk", q, key) * scale + bias.unsqueeze(1)
    return torch.einsum("nhk,khv->nhv", scores.softmax(-1), torch.einsum("kr,hrv->khv", kv[:, :rank], uv))


def run(
    q_NHd: Tensor, kv_KD: Tensor, uk_HnR: Tensor, uv_HRv: Tensor, bias_NK: Tensor, scale: float
) -> tuple[Tensor, ...]:
    queries, heads = q_NHd.shape[:2]
    nope, rank = uk_HnR.shape[1:]
    q = torch.cat([torch.einsum("nhd,hdr->nhr", q_NHd[..., :nope], uk_HnR), q_NHd[..., nope:]], -1)
    bias = bias_NK.unsqueeze(1).expand(-1, heads, -1).reshape(1, queries * heads, -1)
    u = ref.absorbed(q.view(1, queries * heads, -1), kv_KD.unsqueeze(0), bias, scale, rank).view(queries, heads, rank)
    key, value = ref.expand_latents(kv_KD, uk_HnR, uv_HRv)
    plain = ref.attend(q_NHd.transpose(0, 1), key, value, bias_NK, scale).transpose(0, 1)
    return torch.einsum("nhr,hrv->nhv", u, uv_HRv), plain


BACKENDS = {"ref": run}


def pages_of(generator: torch.Generator, contexts: Sequence[int]) -> tuple[Tensor, int]:
    """A page table int32 [R, L] of rows of these lengths, pages in random order and 0 beyond a row's end; and how many
    pages there are.
    """
    counts = [-(-context // PAGE) for context in contexts]
    order = torch.randperm(sum(counts), generator=generator).to(torch.int32) + 1
    table = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    for row, pages in enumerate(torch.split(order, counts)):
        table[row, : len(pages)] = pages
    return table, sum(counts) + 1


def poisoned(plane_PSX: Tensor, table_RL: Tensor, contexts: Sequence[int]) -> Tensor:
    """The same plane with large finite values in tokens that no row may read: a page may be recycled, so it holds
    anything finite.
    """
    allowed = torch.zeros(plane_PSX.shape[:2], dtype=torch.bool)
    for table_L, context in zip(table_RL.long(), contexts, strict=True):
        index = torch.arange(context)
        allowed[table_L[index // PAGE], index % PAGE] = True
    allowed[0, 0] = True  # where padding reads
    return torch.where(allowed.view(*allowed.shape, *(1 for _ in plane_PSX.shape[2:])), plane_PSX, torch.full((), 1e3))


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and one float32 scale [1]."""
    scale = torch.tensor([0.05])
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


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
        rank, rope, v, scale = 512, 64, 128, 192**-0.5
        table, pages = pages_of(generator, contexts)
        plane = poisoned(normal(generator, pages, PAGE, rank + rope), table, contexts).to(dtype)
        stored, inputs = plane, {}
        if fp8:
            stored, inputs["plane_scale"] = quantized(plane.float())
            plane = stored.float() * inputs["plane_scale"]
        q = normal(generator, len(contexts) * query, heads, rank + rope, dtype=dtype)
        uv = (normal(generator, heads, rank, v) * rank**-0.5).to(dtype)
        positions = torch.cat([torch.arange(context - query, context).clamp_min(0) for context in contexts])
        exact, lse = (
            torch.empty(len(q), heads, rank, dtype=torch.float64),
            torch.empty(len(q), heads, dtype=torch.float64),
        )
        for token, position in enumerate(positions.tolist()):
            kv = plane[table[token // query].long()].flatten(0, 1)[: position + 1].double()
            scores = q[token].double() @ kv.T * scale
            exact[token], lse[token] = scores.softmax(-1) @ kv[:, :rank], scores.logsumexp(-1)
        pairs = heads * int(positions.sum() + len(positions))
        yield KernelCase(
            name=(
                f"{heads} heads, contexts {contexts}, {query} queries, {splits}"
                f" splits{', e4m3' * fp8}{', fixed' * fixed}"
            ),
            inputs={
                "query_THD": q,
                "plane_PSD": stored,
                "table_RL": table,
                "positions_T": positions,
                "uv_HRv": uv,
                "scale": scale,
                "rank": rank,
                "splits": splits,
                "query": query,
                "fixed": fixed,
                **inputs,
            },
            exact=(exact, lse, torch.einsum("thr,hrv->thv", exact, uv.double()).flatten(1)),
            tolerance=tolerance_of(dtype),
            flops=2 * pairs * (2 * rank + rope),
            bytes=sum(contexts) * (rank + rope) * stored.itemsize + size(q),
        )


def run_decode(uv_HRv: Tensor, **inputs: Any) -> tuple[Tensor, ...]:
    """Own kernels: split-KV decode, then both merges."""
    from thalweg.kernels.mla import triton

    partial, lse = triton.decode(**inputs)
    merged = triton.merge(partial, lse, inputs["query_THD"].dtype)
    return merged, lse.logsumexp(-1), triton.merge_up(partial, lse, uv_HRv)


def prefill_cases(generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Iterator[KernelCase]:
    """exact: out [T, H, v] and LSE [T, H]."""
    for heads, queries, contexts, causal in (
        (16, (200,), (200,), True),
        (2, (130, 1, 64, 5), (190, 70, 64, 133), True),
        (4, (300,), (1000,), True),
        (4, (129, 7), (64, 300), False),
    ):
        nope, rope, v, scale = 128, 64, 128, 192**-0.5
        q = normal(generator, sum(queries), heads, nope + rope, dtype=dtype)
        kv, turned = (normal(generator, sum(contexts), *shape, dtype=dtype) for shape in ((heads, nope + v), (rope,)))
        starts, begins = (torch.tensor((0, *counts)).cumsum(0).to(torch.int32) for counts in (queries, contexts))
        out, lse = torch.empty(len(q), heads, v, dtype=torch.float64), torch.empty(len(q), heads, dtype=torch.float64)
        pairs = 0
        for i, (query, context) in enumerate(zip(queries, contexts, strict=True)):
            own, its = slice(starts[i], starts[i + 1]), slice(begins[i], begins[i + 1])
            key = torch.cat((kv[its, :, :nope], turned[its, None].expand(-1, heads, -1)), -1).double()
            scores = torch.einsum("qhd,shd->qhs", q[own].double(), key) * scale
            unseen = torch.arange(context) > context - query + torch.arange(query).unsqueeze(1)
            if causal:
                scores.masked_fill_(unseen.unsqueeze(1), -torch.inf)
            out[own] = torch.einsum("qhs,shv->qhv", scores.softmax(-1), kv[its, :, nope:].double())
            lse[own] = scores.logsumexp(-1)
            pairs += heads * (query * context - int(unseen.sum()) * causal)
        yield KernelCase(
            name=f"prefill, {heads} heads, {queries} of {contexts} tokens{', causal' * causal}",
            inputs={
                "query_THq": q,
                "key_SHn": kv[..., :nope],
                "rope_Sc": turned,
                "value_SHv": kv[..., nope:],
                "query_starts_R1": starts,
                "context_starts_R1": begins,
                "max_query": max(queries),
                "scale": scale,
                "causal": causal,
            },
            exact=(out, lse),
            tolerance=tolerance_of(dtype),
            flops=2 * pairs * (nope + rope + v),
            bytes=size(q, kv, turned),
        )


def run_prefill(**inputs: Any) -> tuple[Tensor, ...]:
    """Own kernel."""
    from thalweg.kernels.mla import triton

    return triton.prefill(**inputs)


DECODE: dict[str, Run] = {"triton": run_decode} if triton_available() else {}
PREFILL: dict[str, Run] = {"triton": run_prefill} if triton_available() else {}


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for name, heads, rows, context in DECODES[device.type]:
        label = f"{name} decode, {heads} heads, {rows} x {context} tokens"
        if device.type == "cuda":
            yield _sized_decode(label, heads, rows, context)
        else:
            yield _sized_gathered(label, heads, rows, context)
    for name, heads, tokens in PREFILLS[device.type]:
        yield _sized_prefill(f"{name} prefill, {heads} heads, {tokens} tokens", heads, tokens)


def _sized_gathered(name: str, heads: int, rows: int, context: int) -> TimedCase:
    """Absorbed queries over gathered latents, of the bundled model's dims."""
    rank, rope = 128, 16

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        q = draw_tensor(generator, rows, heads, rank + rope, dtype=torch.float32)
        return {"q_NQD": q, "kv_NKD": draw_tensor(generator, rows, context, rank + rope, dtype=torch.float32)}

    def by_torch(q_NQD: Tensor, kv_NKD: Tensor) -> tuple[Tensor, ...]:
        out = torch.nn.functional.scaled_dot_product_attention(q_NQD, kv_NKD, kv_NKD[..., :rank], scale=rank**-0.5)
        return (out,)

    def by_ref(q_NQD: Tensor, kv_NKD: Tensor) -> tuple[Tensor, ...]:
        return (ref.absorbed(q_NQD, kv_NKD, torch.zeros(1, 1, 1, device=q_NQD.device), rank**-0.5, rank),)

    backends: dict[str, Run] = {"ref": by_ref, "sdpa": by_torch}
    flops, moved = 2 * rows * heads * context * (2 * rank + rope), 4 * rows * context * (rank + rope)
    return TimedCase(name, draw, backends, lambda given: (flops, moved), "float32", 1e-4)


def _sized_decode(name: str, heads: int, rows: int, context: int) -> TimedCase:
    rank, rope, scale = 512, 64, 192**-0.5

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        pages = rows * context // PAGE
        order = torch.randperm(pages, generator=generator, device=generator.device).to(torch.int32) + 1
        return {
            "query_THD": draw_tensor(generator, rows, heads, rank + rope), "plane_PSD": draw_tensor(generator, pages + 1, PAGE, rank + rope),
            "table_RL": order.view(rows, -1), "positions_T": torch.full((rows,), context - 1, device=generator.device),
        }  # fmt: skip

    def by_ref(query_THD: Tensor, plane_PSD: Tensor, table_RL: Tensor, positions_T: Tensor) -> tuple[Tensor, ...]:
        kv = plane_PSD[table_RL.long()].flatten(1, 2).float()
        none = torch.zeros(1, 1, 1, device=kv.device)
        return (ref.absorbed(query_THD.float(), kv, none, scale, rank),)

    def by_triton(query_THD: Tensor, plane_PSD: Tensor, table_RL: Tensor, positions_T: Tensor) -> tuple[Tensor, ...]:
        from thalweg.kernels.mla import triton

        splits, given = triton.splits_for(rows, heads, context), (plane_PSD, table_RL, positions_T)
        partial, lse = triton.decode(query_THD, *given, scale=scale, rank=rank, splits=splits)
        return (triton.merge(partial, lse, query_THD.dtype),)

    def by_flashmla(query_THD: Tensor, plane_PSD: Tensor, table_RL: Tensor, positions_T: Tensor) -> tuple[Tensor, ...]:
        lengths = (positions_T + 1).to(torch.int32)
        return (ext.decode(query_THD, plane_PSD, table_RL, lengths, ext.schedule(), scale=scale, rank=rank)[0],)

    backends: dict[str, Run] = {"ref": by_ref}
    if DECODE:
        backends["triton"] = by_triton
    if ext.available():
        backends["flashmla"] = by_flashmla
    flops, moved = 2 * rows * heads * context * (2 * rank + rope), 2 * rows * (rank + rope) * (context + heads)
    return TimedCase(name, draw, backends, lambda given: (flops, moved), "bf16", tolerance_of(torch.bfloat16))


def _sized_prefill(name: str, heads: int, tokens: int) -> TimedCase:
    """One causal prompt, keys and values decompressed."""
    nope, rope, v, scale = 128, 64, 128, 192**-0.5

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        return {
            "query_THq": draw_tensor(generator, tokens, heads, nope + rope), "kv_SHx": draw_tensor(generator, tokens, heads, nope + v),
            "rope_Sc": draw_tensor(generator, tokens, rope),
            "starts_R1": torch.tensor((0, tokens), dtype=torch.int32, device=generator.device),
        }  # fmt: skip

    def whole(kv_SHx: Tensor, rope_Sc: Tensor) -> tuple[Tensor, Tensor]:
        key = torch.cat((kv_SHx[..., :nope], rope_Sc.unsqueeze(1).expand(-1, heads, -1)), -1)
        return key, kv_SHx[..., nope:]

    def by_ref(query_THq: Tensor, kv_SHx: Tensor, rope_Sc: Tensor, starts_R1: Tensor) -> tuple[Tensor, ...]:
        key, value = whole(kv_SHx.float(), rope_Sc.float())
        behind = torch.full((tokens, tokens), -torch.inf, device=key.device).triu_(1)
        query = query_THq.float().transpose(0, 1)
        return (ref.attend(query, key.transpose(0, 1), value.transpose(0, 1), behind, scale).transpose(0, 1),)

    def by_triton(query_THq: Tensor, kv_SHx: Tensor, rope_Sc: Tensor, starts_R1: Tensor) -> tuple[Tensor, ...]:
        given = {"key_SHn": kv_SHx[..., :nope], "rope_Sc": rope_Sc, "value_SHv": kv_SHx[..., nope:]}
        starts = {"query_starts_R1": starts_R1, "context_starts_R1": starts_R1}
        return run_prefill(query_THq=query_THq, **given, **starts, max_query=tokens, scale=scale, causal=True)[:1]

    def by_fa3(query_THq: Tensor, kv_SHx: Tensor, rope_Sc: Tensor, starts_R1: Tensor) -> tuple[Tensor, ...]:
        """With the keys put together, as a layer has to."""
        given = query_THq, *whole(kv_SHx, rope_Sc), starts_R1, starts_R1
        return fa3.prefill(*given, max_query=tokens, max_context=tokens, scale=scale)[:1]

    backends: dict[str, Run] = {"ref": by_ref}
    if PREFILL:
        backends["triton"] = by_triton
    if fa3.available():
        backends["fa3"] = by_fa3
    flops, moved = (
        tokens * (tokens + 1) * heads * (nope + rope + v),
        2 * tokens * (heads * (2 * nope + rope + 2 * v) + rope),
    )
    return TimedCase(name, draw, backends, lambda given: (flops, moved), "bf16", tolerance_of(torch.bfloat16))
