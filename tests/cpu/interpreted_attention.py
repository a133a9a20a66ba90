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
from thalweg.kernels.attend.args import DecodeRows, KvPlanes, LatentPlane, PagedRows, RaggedRows, RowLengths
from thalweg.kernels.attend.case import PAGE, exact_rows, last_positions, page_table, paged_plane, row_tokens, starts_of
from thalweg.kernels.attend.ref import merge_states
from thalweg.kernels.gqa import triton as gqa
from thalweg.kernels.mla import triton as mla
from thalweg.kernels.mla.backends import MlaShape, TritonMlaDecode

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


def main() -> int:
    interpret_scalars()
    for query, splits in ((1, 3), (2, 1)):
        decode(query, splits)
    prefill()
    backend()
    return 0


if __name__ == "__main__":
    sys.exit(main())
