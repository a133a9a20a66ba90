"""Attention kernels under Triton's interpreter, which needs no GPU: a context cut into parts and merged by its LSE is the
whole. A process of its own, since Triton looks once whether it interprets.

    TRITON_INTERPRET=1 python -m tests.cpu.interpreted_attention
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from thalweg.kernels.attend import triton as attend
from thalweg.kernels.attend.args import (
    DecodeRows,
    KvPlanes,
    KvWrite,
    LatentPlane,
    PagedRows,
    QueryRows,
    RaggedRows,
    RowLengths,
)
from thalweg.kernels.attend.case import PAGE, exact_rows, last_positions, page_table, paged_plane, row_tokens, starts_of
from thalweg.kernels.attend.ref import merge_states, rotate_
from thalweg.kernels.dsa import triton as dsa
from thalweg.kernels.gqa import triton as gqa
from thalweg.kernels.mla import triton as mla
from thalweg.kernels.mla.backends import MlaShape, TritonMlaDecode
from thalweg.memory.planes import decode as decode_plane
from thalweg.memory.planes import encode

States = tuple[Tensor, Tensor]
HEADS, RANK, ROPE, SCALE = 3, 32, 16, 0.1
CUTS = ((0, 1, 9), (0, 2, 3, 9), (0, 9, 12))  # pages at which contexts are cut; of the last, the last part is empty


def interpret_scalars() -> None:
    """Lets the interpreter loop over tensor bounds, which numpy 2.4 no longer converts to a number."""
    patch: Any = vars(interpreter)["_patch_lang_tensor"]

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    vars(interpreter)["_patch_lang_tensor"] = patched


def close(got: States, want: States) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def parts_of(table_RL: Tensor, positions_T: Tensor, cuts: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """The page table and positions of each part: -1 sees nothing of it."""
    padded = torch.nn.functional.pad(table_RL, (0, cuts[-1]))
    parts = []
    for first, stop in pairwise(cuts):
        positions = (positions_T - first * PAGE).clamp(-1, (stop - first) * PAGE - 1)
        parts.append((padded[:, first:stop].contiguous(), positions))
    return parts


def merged_by_pairs(states: list[States]) -> States:
    """By the kernel, in place."""
    (out, lse), *rest = ((out.clone(), lse.clone()) for out, lse in states)
    for part in rest:
        attend.merge_state_(out, lse, *part)
    return out, lse


def decode(query: int, splits: int) -> None:
    """Latents, and keys and values of heads; contexts of less than a page, and of several."""
    generator, contexts = torch.Generator().manual_seed(1), (200, 70, query)
    lengths, (table, _) = RowLengths((query,) * 3, contexts), page_table(generator, contexts)
    positions, tokens = last_positions(lengths), 3 * query
    plane = paged_plane(generator, table, contexts, RANK + ROPE, dtype=torch.float32)
    q = torch.randn(tokens, HEADS, RANK + ROPE, generator=generator)
    keys = [kv.unsqueeze(1) for kv in row_tokens(plane, table, contexts)]
    exact = exact_rows(q, keys, [key[..., :RANK] for key in keys], lengths, SCALE)
    kv = KvPlanes(*(paged_plane(generator, table, contexts, 2, 32, dtype=torch.float32) for _ in range(2)))
    q_grouped = torch.randn(tokens, 6, 32, generator=generator)
    exact_grouped = exact_rows(q_grouped, *(row_tokens(x, table, contexts) for x in kv[:2]), lengths, SCALE)
    for cuts in CUTS:
        latent, grouped = [], []
        for part_table, part_positions in parts_of(table, positions, cuts):
            rows = DecodeRows(part_table, part_positions, query, 64 * len(part_table[0]))
            states = mla.decode(q, LatentPlane(plane), rows, scale=SCALE, rank=RANK, splits=splits)
            latent.append(attend.merge_with_lse(*states, torch.float32))
            states = gqa.decode(q_grouped, kv, rows, scale=SCALE, splits=splits)
            grouped.append(attend.merge_with_lse(*states, torch.float32))
        for got, want in ((latent, exact), (grouped, exact_grouped)):
            whole = want[0].float(), want[1].float()
            close(merge_states(*zip(*got, strict=True)), whole)
            close(merged_by_pairs(got), whole)
            assert any(bool((lse == -torch.inf).any()) for _, lse in got), "a part that is not seen"


def prefill() -> None:
    """Keys and values of heads over pages; and expanded latents, of which the rows' own tokens come last."""
    generator, lengths = torch.Generator().manual_seed(2), RowLengths((70, 1, 5), (190, 70, 5))
    table, _ = page_table(generator, lengths.contexts)
    kv = KvPlanes(*(paged_plane(generator, table, lengths.contexts, 2, 32, dtype=torch.float32) for _ in range(2)))
    positions, starts = last_positions(lengths), starts_of(lengths.queries)
    q = torch.randn(76, 4, 32, generator=generator)
    whole = gqa.prefill(q, kv, PagedRows(table, positions, starts, 70), scale=SCALE)
    exact = exact_rows(q, *(row_tokens(x, table, lengths.contexts) for x in kv[:2]), lengths, SCALE)
    torch.testing.assert_close(whole, exact[0].float(), rtol=1e-5, atol=1e-5)
    for cuts in CUTS:
        paged = [PagedRows(*part, starts, 70) for part in parts_of(table, positions, cuts)]
        lses = [torch.empty(76, 4) for _ in paged]
        parts = [
            (gqa.prefill(q, kv, rows, scale=SCALE, lse_TH=lse), lse) for rows, lse in zip(paged, lses, strict=True)
        ]
        close(merge_states(*zip(*parts, strict=True)), (whole, exact[1].float()))
    key, value = (torch.randn(265, 4, 32, generator=generator) for _ in range(2))
    rope, q = torch.randn(265, ROPE, generator=generator), torch.randn(76, 4, 32 + ROPE, generator=generator)

    def states(firsts: list[int], counts: list[int], causal: bool) -> States:
        """Attention to so many tokens of each row's context, from these on."""
        begins = (torch.tensor(firsts) + starts_of(lengths.contexts)[:-1]).tolist()
        index = torch.cat([torch.arange(begin, begin + n) for begin, n in zip(begins, counts, strict=True)])
        rows = RaggedRows(starts, starts_of(counts), 70, max(counts), causal)
        return mla.prefill(q, key[index], rope[index], value[index], rows, scale=SCALE)

    want, cached = states([0] * 3, list(lengths.contexts), True), [120, 69, 0]
    own = states(cached, list(lengths.queries), True)
    for first in (0, 64, 100):
        before = [min(first, n) for n in cached]
        rest = states(before, [n - b for n, b in zip(cached, before, strict=True)], False)
        parts = [states([0] * 3, before, False), rest, own] if first else [rest, own]
        close(merge_states(*zip(*parts, strict=True)), want)
        close(merged_by_pairs(parts), want)


def backend() -> None:
    """Attention that is asked for its LSE gives the latents of the attention that is not."""
    generator, contexts = torch.Generator().manual_seed(3), (200, 70)
    table, _ = page_table(generator, contexts)
    latents = LatentPlane(paged_plane(generator, table, contexts, RANK + ROPE, dtype=torch.float32))
    q, uv = (torch.randn(*dims, generator=generator) for dims in ((2, HEADS, RANK + ROPE), (HEADS, RANK, 16)))
    kernel, rows = (
        TritonMlaDecode(MlaShape(HEADS, RANK, SCALE, False)),
        DecodeRows(table, torch.tensor([199, 69]), 1, 200),
    )
    sums, lse = kernel.attend_with_lse(q, latents, rows, None)
    got = kernel.attend(q, latents, uv, rows, None)
    torch.testing.assert_close(torch.einsum("thr,hrv->thv", sums, uv).flatten(1), got, rtol=1e-4, atol=1e-4)
    assert lse.shape == (2, HEADS) and lse.dtype == torch.float32


def sparse(dtype: torch.dtype) -> None:
    """Index keys are stored as the plain layer stores them, scored and chosen as by plain torch, and attention to the
    chosen tokens is attention with a mask. Many scores are 0, and rows have fewer tokens than are chosen.
    """
    generator, contexts, heads, dim, topk = torch.Generator().manual_seed(4), (200, 70, 300), 4, 32, 75
    lengths, (table, _) = RowLengths((3, 1, 2), contexts), page_table(generator, contexts)
    positions, tokens = last_positions(lengths), 6
    rows = QueryRows(torch.tensor([0, 0, 0, 1, 2, 2], dtype=torch.int32), table, positions)
    keys = paged_plane(generator, table, contexts, dim, dtype=torch.float32)
    # the step's own tokens
    key, query = torch.randn(tokens, dim, generator=generator), torch.randn(tokens, heads * dim, generator=generator)
    norm = dsa.KeyNorm(torch.rand(dim, generator=generator), torch.randn(dim, generator=generator), 1e-6)
    angle = torch.outer(torch.arange(400.0), torch.rand(8, generator=generator))
    turned, asked = torch.layer_norm(key, (dim,), norm.weight_d, norm.bias_d, norm.eps), query.clone()
    rotation = torch.polar(torch.ones_like(angle), angle)[positions].unsqueeze(1)
    rotate_(turned, rotation, 0, 1, dim)
    rotate_(asked, rotation, 0, heads, dim)
    at = torch.stack([table[row, p // PAGE] * PAGE + p % PAGE for row, p in zip(rows.rows_T, positions, strict=True)])
    dsa.write(key, query, norm, KvWrite(angle.cos(), angle.sin(), positions, at.long()), keys)
    torch.testing.assert_close(query, asked, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys.view(-1, dim)[at.long()], turned, rtol=1e-5, atol=1e-5)
    weights = torch.randn(tokens, heads, generator=generator)
    got = dsa.scores(query, weights, keys, rows, max(contexts), 0.3)
    context, chosen = row_tokens(keys, table, contexts), dsa.choose(got, positions, topk)
    latents = paged_plane(generator, table, contexts, RANK + ROPE, dtype=torch.float32)
    scale, bound = (None, 1e-5) if dtype == torch.float32 else (torch.tensor([0.5]), 3e-3)
    plane = LatentPlane(encode(latents, dtype, scale), scale)
    latents = decode_plane(plane.paged_PSD, torch.float32, scale)
    q = torch.randn(tokens, HEADS, RANK + ROPE, generator=generator)
    sums, _ = attend.merge_with_lse(*dsa.attend(q, plane, chosen, rows, scale=SCALE, rank=RANK), torch.float32)
    for t, (row, position) in enumerate(zip(rows.rows_T.tolist(), positions.tolist(), strict=True)):
        seen = context[row][: position + 1]
        want = 0.3 * (weights[t] @ (query[t].view(heads, dim) @ seen.T).relu()) + torch.arange(position + 1) * 1e-20
        torch.testing.assert_close(got[t, : position + 1], want, rtol=1e-4, atol=1e-5)
        best = got[t, : position + 1].topk(min(topk, position + 1)).indices.sort().values
        filled = torch.nn.functional.pad(best, (0, topk - len(best)), value=-1)
        assert chosen[t].tolist() == filled.tolist(), t
        latent = row_tokens(latents, table, contexts)[row][best]
        exact = (SCALE * q[t] @ latent.T).softmax(-1) @ latent[:, :RANK]
        torch.testing.assert_close(sums[t], exact, rtol=10 * bound, atol=bound)


def chosen_of_ties() -> None:
    """All scores of a few values, negative ones too: the latest of equal ones, exactly as many as there is room for."""
    generator = torch.Generator().manual_seed(5)
    for topk, columns in ((64, 320), (100, 5000), (2048, 2049)):
        values = torch.tensor([-torch.inf, -2.0, -1e-20, 0.0, 1e-20, 3.0])
        scores = values[torch.randint(0, 6, (2, columns), generator=generator)]
        positions = torch.tensor([columns - 1, columns - 7])
        chosen = dsa.choose(scores, positions, topk)
        for t, position in enumerate(positions.tolist()):
            order = sorted(range(position + 1), key=lambda i, t=t: (float(scores[t, i]), i))  # type: ignore[misc]
            wanted = sorted(order[-topk:])
            assert chosen[t].tolist() == wanted + [-1] * (topk - len(wanted))


def main() -> int:
    interpret_scalars()
    sparse(torch.float32)
    sparse(torch.float8_e4m3fn)
    chosen_of_ties()
    for query, splits in ((1, 3), (2, 1)):
        decode(query, splits)
    prefill()
    backend()
    return 0


if __name__ == "__main__":
    sys.exit(main())
