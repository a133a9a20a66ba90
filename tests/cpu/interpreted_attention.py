"""Attention kernels under Triton's interpreter, which needs no GPU: a context cut into parts and merged by its LSE is
the whole. A process of its own, since Triton looks once whether it interprets.

    TRITON_INTERPRET=1 python -m tests.cpu.interpreted_attention
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from tests.cpu.interpreter import prepare
from thalweg.attention.tree_paths import paths_of_tree
from thalweg.batch.batch import TreeMask
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
from thalweg.kernels.attend.ref import hadamard, merge_states, rotate_
from thalweg.kernels.dsa import triton as dsa
from thalweg.kernels.gqa import triton as gqa
from thalweg.kernels.mla import triton as mla
from thalweg.kernels.mla.backends import MlaShape, TritonMlaDecode
from thalweg.kernels.router.triton import partial_logits
from thalweg.memory.planes import Planes, index_plane, record_plane, vector_plane
from thalweg.memory.records import quantize

States = tuple[Tensor, Tensor]
HEADS, RANK, ROPE, SCALE = 3, 32, 16, 0.1
CUTS = ((0, 1, 9), (0, 2, 3, 9), (0, 9, 12))  # pages at which contexts are cut; of the last, the last part is empty


def exact_casts() -> None:
    """Lets the interpreter round to e4m3 and bfloat16 as a GPU does, to nearest."""
    builder: Any = interpreter.InterpreterBuilder
    types = {tl.float8e4nv: torch.float8_e4m3fn, tl.bfloat16: torch.bfloat16}

    def patched(plain: Any) -> Any:
        def cast(self: Any, src: Any, target: Any, *rounding: Any) -> Any:
            if src.dtype.scalar != tl.float32 or target.scalar not in types:
                return plain(self, src, target, *rounding)
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(types[target.scalar])
            stored = torch.uint8 if rounded.itemsize == 1 else torch.uint16
            return interpreter.TensorHandle(rounded.view(stored).numpy(), target.scalar)

        return cast

    for name in ("create_fp_to_fp", "create_fp_trunc"):
        setattr(builder, name, patched(getattr(builder, name)))


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


def sparse(is_fp8: bool, has_trees: bool) -> None:
    """Index keys are stored as plain torch stores them, scored and chosen as by plain torch, and attention to the
    chosen tokens is attention with a mask. Many scores are 0, and rows have fewer tokens than are chosen. is_fp8: keys
    and queries in e4m3, turned, and latents in records. has_trees: the last tokens of a row are drafts that branch.
    """
    generator, contexts, heads, dim, topk = torch.Generator().manual_seed(4), (200, 70, 300), 4, 32, 75
    rank = 256 if is_fp8 else RANK
    lengths, (table, _) = RowLengths((3, 1, 2), contexts), page_table(generator, contexts)
    columns, tokens = last_positions(lengths), 6
    # a tree: the third token follows the first, beside the second
    positions = columns - (torch.arange(tokens) == 2).long() * has_trees
    tree = TreeMask(columns, torch.tensor([-1, -1, -1 - 2, -1, -1, -1]), 1)
    paths = paths_of_tree(tree, tokens) if has_trees else None
    rows = QueryRows(torch.tensor([0, 0, 0, 1, 2, 2], dtype=torch.int32), table, positions, paths)
    spec = index_plane(0, dim) if is_fp8 else vector_plane("index", 0, dim, torch.float32)
    planes = Planes((spec, record_plane(0, rank, ROPE)), int(table.max()) + 1)
    slots = [table[row, : -(-n // PAGE)].repeat_interleave(PAGE)[:n] * PAGE + torch.arange(n) % PAGE
             for row, n in enumerate(contexts)]  # fmt: skip
    for slot in slots:
        planes.write("index", 0, slot.long(), torch.randn(len(slot), dim, generator=generator))
        planes.write("latent", 0, slot.long(), torch.randn(len(slot), rank + ROPE, generator=generator))
    before = planes.paged("index", 0).clone()
    # the step's own tokens
    key, query = torch.randn(tokens, dim, generator=generator), torch.randn(tokens, heads * dim, generator=generator)
    norm = dsa.KeyNorm(torch.rand(dim, generator=generator), torch.randn(dim, generator=generator), 1e-6)
    angle = torch.outer(torch.arange(400.0), torch.rand(8, generator=generator))
    turned, asked = torch.layer_norm(key, (dim,), norm.weight_d, norm.bias_d, norm.eps), query.clone()
    rotation = torch.polar(torch.ones_like(angle), angle)[positions].unsqueeze(1)
    rotate_(turned, rotation, 0, 1, dim)
    rotate_(asked, rotation, 0, heads, dim)
    at = torch.stack([slots[row][c] for row, c in zip(rows.rows_T, columns, strict=True)]).long()
    weights = torch.randn(tokens, heads, generator=generator)
    given, write = weights, KvWrite(angle.cos(), angle.sin(), positions, at)
    part = torch.randn(tokens, heads, generator=generator)
    parts = torch.stack((given - part, part))
    stored, weights = dsa.write(key, query, parts, norm, write, planes.paged("index", 0), 0.3, is_fp8), parts[0]
    if is_fp8:
        codes, scale = quantize(hadamard(asked.view(tokens, heads, dim)).flatten(1), dim)
        assert float((codes.float() != stored.float()).float().mean()) < 0.02, "sums in another order, near a tie"
        torch.testing.assert_close(stored.float(), codes.float(), rtol=0.13, atol=1e-2)
        torch.testing.assert_close(weights, 0.3 * given * scale, rtol=1e-6, atol=1e-6)
        query = stored.float()
    else:
        torch.testing.assert_close(query, asked, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights, 0.3 * given, rtol=1e-6, atol=1e-6)
        assert stored is query
    got = dsa.scores(stored, weights, planes.paged("index", 0), rows, max(contexts))
    ours = planes.paged("index", 0).clone()
    planes.paged("index", 0).copy_(before)
    planes.write("index", 0, at, hadamard(turned) if is_fp8 else turned)
    for mine, theirs in zip(
        *(planes.read("index", 0, x, torch.float32) for x in (ours, planes.paged("index", 0))), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0.13 if is_fp8 else 1e-5, atol=1e-2 if is_fp8 else 1e-5)
    keys = planes.read("index", 0, ours, torch.float32).flatten(0, 1)
    chosen = dsa.choose(got, positions, topk)
    bound = 1e-5
    if is_fp8:
        plane = LatentPlane(planes.paged("latent", 0))
        latents = planes.read("latent", 0, planes.tokens("latent", 0), torch.float32)
    else:
        latents = torch.randn(planes.pages * PAGE, rank + ROPE, generator=generator)
        plane = LatentPlane(latents.view(planes.pages, PAGE, -1))
    q = torch.randn(tokens, HEADS, rank + ROPE, generator=generator)
    results = [
        attend.merge_with_lse(*dsa.attend(q, plane, *of, rank=rank, scale=SCALE, splits=splits), torch.float32)[0]
        for of in ((chosen, rows, topk), (None, rows, 320))
        for splits in (0, 3)
    ]
    for t, (row, column) in enumerate(zip(rows.rows_T.tolist(), columns.tolist(), strict=True)):
        path = [c for c in range(column + 1) if not (has_trees and t == 2 and c == column - 1)]
        assert len(path) == int(positions[t]) + 1
        seen = slots[row][path].long()
        want = weights[t] @ (query[t].view(heads, dim) @ keys[seen].T).relu()
        torch.testing.assert_close(got[t, : len(path)], want, rtol=1e-4, atol=1e-5)
        order = torch.sort(got[t, : len(path)], descending=True, stable=True).indices
        best = order[:topk].sort().values
        filled = torch.nn.functional.pad(best, (0, topk - len(best)), value=-1)
        assert chosen[t].tolist() == filled.tolist(), t
        for places, sums in zip((seen[best], seen), (results[:2], results[2:]), strict=True):
            exact = (SCALE * q[t] @ latents[places].T).softmax(-1) @ latents[places, :rank]
            for of in sums:
                torch.testing.assert_close(of[t], exact, rtol=10 * bound, atol=bound)


def chosen_of_ties() -> None:
    """All scores of a few values, negative ones too: the first of equal ones, exactly as many as there is room for; of
    contexts that one program compares at once, and of some that are divided, whose highest are everywhere, at the
    start, at the end, in the middle, or repeat; of a token that sees nothing, and where scores are NaN, the highest.
    """
    generator, values = torch.Generator().manual_seed(5), torch.tensor([-torch.inf, -2.0, -1e-20, -0.0, 0.0, 3.0])
    for topk, columns, at_once in (
        (64, 320, 8192),
        (100, 5000, 512),
        (2048, 2049, 8192),
        (100, 5000, 8192),
        (7, 20, 64),
        (40, 700, 64),
        (64, 140000, 1 << 16),
    ):
        dsa.AT_ONCE = at_once
        last = columns - 1
        positions = torch.tensor([last, last - 6, max(last - 69, 0), min(topk + 9, last), min(at_once, last), -1])
        positions = torch.cat([positions, torch.tensor([last, last - 1, last, last, last, last])])
        scores = values[torch.randint(0, 6, (len(positions), columns), generator=generator)]
        scores[2:5] = torch.randn(3, columns, generator=generator)
        scores[6:8] = torch.arange(columns) * torch.tensor([[1.0], [-1.0]])
        scores[8] = torch.randn(columns, generator=generator) + 9 * (torch.arange(columns) // at_once % 5 // 3)
        scores[9] = torch.randn(4096, generator=generator).repeat(columns // 4096 + 1)[:columns]
        scores[:, (0, last)], scores[4, positions[4]] = 4.0, 4.0
        scores[9, last // 2] = scores[10, last // 3 :] = scores[11] = torch.nan
        chosen = dsa.choose(scores, positions, topk)
        for t, position in enumerate(positions.tolist()):
            order = scores[t, : position + 1].sort(descending=True, stable=True).indices
            wanted = order[:topk].sort().values.tolist()
            assert chosen[t].tolist() == wanted + [-1] * (topk - len(wanted)), (topk, columns, t)


def weights_of_heads() -> None:
    """A token's bits are its own."""
    generator = torch.Generator().manual_seed(6)
    x, weight = (torch.randn(rows, 100, generator=generator) for rows in (40, 5))
    got = partial_logits(x, weight, deterministic=True).logits_STE
    torch.testing.assert_close(got.sum(0), x @ weight.T, rtol=1e-5, atol=1e-5)
    assert torch.equal(partial_logits(x[17:18], weight, deterministic=True).logits_STE, got[:, 17:18])


def main() -> int:
    prepare()
    exact_casts()
    for is_fp8 in (False, True):
        for has_trees in (False, True):
            sparse(is_fp8, has_trees)
    chosen_of_ties()
    weights_of_heads()
    for query, splits in ((1, 3), (2, 1)):
        decode(query, splits)
    prefill()
    backend()
    return 0


if __name__ == "__main__":
    sys.exit(main())
