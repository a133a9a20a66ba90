"""Our attention kernels on their cases, the fused writes into the cache, CUDA graphs, and equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.seed import SEED
from thalweg.kernels.attend.args import (
    ContextChunk,
    DecodeRows,
    KvPlanes,
    KvWrite,
    LatentPlane,
    PagedRows,
    RaggedRows,
)
from thalweg.kernels.attend.case import page_table, to_device
from thalweg.kernels.case import KernelCase, Run, normal
from thalweg.kernels.gqa import case as gqa
from thalweg.kernels.mla import case as mla

pytest.importorskip("triton")


def drawn() -> list[object]:
    offers = (
        (mla.decode_cases, mla.DECODE),
        (mla.prefill_cases, mla.PREFILL),
        (gqa.paged_cases, gqa.PAGED),
    )
    generator = torch.Generator().manual_seed(SEED)
    return [
        pytest.param(case, run, id=f"{backend}-{case.name}")
        for cases, backends in offers
        if backends
        for case in cases(generator)
        for backend, run in backends.items()
    ]


def on(device: torch.device, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: to_device(x, device) for name, x in inputs.items()}


def poison(device: torch.device) -> None:
    """What `torch.empty` finds next is not a number."""
    torch.full((1 << 26,), torch.nan, device=device)


@pytest.mark.parametrize(("case", "run"), drawn())
def test_kernels_meet_the_definition(case: KernelCase, run: Run, cuda: torch.device) -> None:
    poison(cuda)
    with torch.inference_mode():
        got = run(**on(cuda, case.fresh_inputs()))
    assert max(case.errors(tuple(x.cpu() for x in got))) <= case.tolerance, f"TEST_SEED={SEED}"


@pytest.mark.parametrize("heads", [16, 128])
def test_fixed_splits_give_the_same_bits_alone_and_in_a_batch(heads: int, cuda: torch.device) -> None:
    from thalweg.kernels.attend.triton import DETERMINISTIC_SPLITS, merge
    from thalweg.kernels.mla import triton

    generator = torch.Generator().manual_seed(SEED)
    table, pages = page_table(generator, (1500, 70, 300))
    plane = normal(generator, pages, 64, 576, dtype=torch.bfloat16).to(cuda)
    q, table = normal(generator, 3, heads, 576, dtype=torch.bfloat16).to(cuda), table.to(cuda)
    positions = torch.tensor([1499, 69, 299], device=cuda)

    def attended(rows: slice) -> Tensor:
        own = DecodeRows(table[rows], positions[rows])
        given = q[rows], LatentPlane(plane), own
        return merge(*triton.decode(*given, scale=0.07, rank=512, splits=DETERMINISTIC_SPLITS, fixed=True))

    together = attended(slice(0, 3))
    for i in range(3):
        alone = attended(slice(i, i + 1))
        assert torch.equal(alone[0], together[i]), f"row {i}"


def test_ragged_tokens_have_the_bits_of_single_ones(cuda: torch.device) -> None:
    """With rows_T, prompt tokens go through the same splits as decode tokens: one formula for the deterministic
    mode.
    """
    from thalweg.kernels.attend.triton import DETERMINISTIC_SPLITS, merge
    from thalweg.kernels.mla import triton

    generator = torch.Generator().manual_seed(SEED)
    table, pages = page_table(generator, (700, 3))
    plane = normal(generator, pages, 64, 576, dtype=torch.bfloat16).to(cuda)
    q, table = normal(generator, 9, 16, 576, dtype=torch.bfloat16).to(cuda), table.to(cuda)
    positions = torch.tensor([694, 695, 696, 697, 698, 699, 0, 1, 2], device=cuda)
    rows = torch.tensor([0] * 6 + [1] * 3, dtype=torch.int32, device=cuda)

    def attended(query: Tensor, own: DecodeRows) -> Tensor:
        given = query, LatentPlane(plane), own
        return merge(*triton.decode(*given, scale=0.07, rank=512, splits=DETERMINISTIC_SPLITS, fixed=True))

    ragged = attended(q, DecodeRows(table, positions, rows_T=rows))
    for i, row in enumerate(rows.tolist()):
        alone = attended(q[i : i + 1], DecodeRows(table[row : row + 1], positions[i : i + 1]))
        assert torch.equal(alone[0], ragged[i]), f"token {i}"


@pytest.mark.parametrize("dim", [64, 128])
def test_a_prompt_in_chunks_has_the_same_bits(dim: int, cuda: torch.device) -> None:
    """Keys are taken 64 at a time from position 0 on, and masked tiles are computed like others: chunks and batches
    change nothing.
    """
    from thalweg.kernels.gqa import triton

    generator = torch.Generator().manual_seed(SEED)
    table, pages = page_table(generator, (330, 90))
    planes = normal(generator, 2, pages, 64, 2, dim, dtype=torch.bfloat16).to(cuda)
    q, table = normal(generator, 420, 6, dim, dtype=torch.bfloat16).to(cuda), table.to(cuda)
    positions = torch.cat((torch.arange(330), torch.arange(90))).to(cuda)

    def part(first: int, last: int, rows: slice, starts: list[int]) -> Tensor:
        counted = torch.tensor(starts, dtype=torch.int32, device=cuda)
        own = PagedRows(table[rows], positions[first:last], counted, last - first)
        return triton.prefill(q[first:last], KvPlanes(planes[0], planes[1]), own, scale=dim**-0.5)

    whole = part(0, 420, slice(0, 2), [0, 330, 420])
    for first, last in ((0, 100), (100, 101), (101, 330)):
        assert torch.equal(part(first, last, slice(0, 1), [0, last - first]), whole[first:last]), (first, last)
    assert torch.equal(part(330, 420, slice(1, 2), [0, 90]), whole[330:])


def test_a_recorded_decode_follows_lengths_that_grow(cuda: torch.device) -> None:
    """A graph recorded with short contexts replays with longer ones: lengths are read on the device."""
    from thalweg.kernels.attend.triton import merge
    from thalweg.kernels.mla import triton

    generator = torch.Generator().manual_seed(SEED)
    plane = normal(generator, 40, 64, 576, dtype=torch.bfloat16).to(cuda)
    q = normal(generator, 4, 16, 576, dtype=torch.bfloat16).to(cuda)
    table, positions = torch.zeros(4, 9, dtype=torch.int32, device=cuda), torch.zeros(4, dtype=torch.int64, device=cuda)

    def step() -> Tensor:
        rows = DecodeRows(table, positions)
        return merge(*triton.decode(q, LatentPlane(plane), rows, scale=0.07, rank=512, splits=4))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    table.copy_(torch.randperm(36, generator=generator).view(4, 9).to(torch.int32) + 1)
    positions.copy_(torch.tensor([0, 64, 300, 575]))
    graph.replay()
    assert torch.equal(out, step())


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2].double(), x[..., 1::2].double()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def near(got: Tensor, exact: Tensor, tolerance: float) -> None:
    assert float((got.double() - exact).abs().max() / exact.abs().max()) <= tolerance


def kept(stored: Tensor, exact: Tensor, scale: float) -> None:
    """Each number of a plane is the nearest that its type has, of what float32 makes of it (some 2^-21 of the largest,
    which a rotation may subtract from). e4m3 has 3 bits of fraction: half a step is 1/16 of a number at most, or 2^-10
    of the scale below its smallest normal number; evenly spread that is 2.6 % in the mean square. bf16 has 7: 2^-8.
    """
    fp8 = stored.dtype == torch.float8_e4m3fn
    exact = exact.clamp(-448 * scale, 448 * scale) if fp8 else exact
    apart = (stored.double() * scale - exact).abs()
    bound = exact.abs() / 16 + scale / 1024 if fp8 else exact.abs() / 256
    assert bool((apart <= bound + exact.abs().max() * 2**-21).all()), float((apart - bound).max())
    assert not fp8 or float(apart.norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [0, 16, 128])
def test_latents_are_normed_turned_and_stored(heads: int, fp8: bool, cuda: torch.device) -> None:
    from thalweg.kernels.rope.triton import LatentNorm, mla_write

    generator, tokens, rank, rope, nope = torch.Generator().manual_seed(SEED), 5, 512, 64, 128
    down = normal(generator, tokens, heads * (nope + rope) + rank + rope + 128, dtype=torch.bfloat16).to(cuda)
    given = down.clone()
    angles = (normal(generator, 30, rope // 2) * 9).to(cuda)
    cos, sin, weight = angles.cos(), angles.sin(), normal(generator, rank).to(cuda)
    positions, write = torch.tensor([3, 29, 0, 0, 7], device=cuda), torch.tensor([70, 191, 64, 3, 100], device=cuda)
    plane = torch.zeros(192, rank + rope, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device=cuda)
    scale = torch.tensor([0.03], device=cuda) if fp8 else None
    at = heads * (nope + rope)
    queries, latent = down[:, :at].view(tokens, heads, nope + rope)[..., nope:], down[:, at : at + rank + rope]
    absorbed = torch.zeros(tokens, heads, rank + rope, dtype=torch.bfloat16, device=cuda)
    given_norm, turn = LatentNorm(weight), KvWrite(cos, sin, positions, write)
    latents = LatentPlane(plane.view(-1, 64, rank + rope), scale)
    mla_write(queries, absorbed[..., rank:], latent, given_norm, turn, latents)
    assert torch.equal(down, given), "without in_place the projection's output stays"
    c, s = cos[positions].double(), sin[positions].double()
    exact = torch.cat(
        (normed(given[:, at : at + rank], weight), turned(given[:, at + rank : at + rank + rope], c, s)), -1
    )
    if heads:
        near(
            absorbed[..., rank:],
            turned(given[:, :at].view(tokens, heads, -1)[..., nope:], c[:, None], s[:, None]),
            4e-3,
        )
        assert not absorbed[..., :rank].any()
    kept(plane[write], exact, 0.03 if fp8 else 1.0)
    assert int((plane.float().abs().sum(1) > 0).sum()) == tokens, "no other row is written"
    mla_write(queries, queries, latent, given_norm, turn, latents, in_place=True)
    near(latent, exact, 4e-3)


@pytest.mark.parametrize(("heads", "tokens"), [(16, 1), (16, 33), (128, 5), (20, 70)])
def test_absorbing_in_one_launch_is_the_same(heads: int, tokens: int, cuda: torch.device) -> None:
    from thalweg.kernels.rope.triton import LatentNorm, mla_absorb, mla_write

    generator, width = torch.Generator().manual_seed(SEED), heads * 192
    down = normal(generator, tokens, width + 576, dtype=torch.bfloat16).to(cuda)
    uk = (normal(generator, heads, 128, 512, dtype=torch.bfloat16) * 0.1).to(cuda)
    angles, weight = (normal(generator, 30, 32) * 9).to(cuda), normal(generator, 512).to(cuda)
    queries, latent = down[:, :width].view(tokens, heads, 192), down[:, width:]
    positions = torch.randint(30, (tokens,), generator=generator).to(cuda)
    planes = torch.zeros(2, 192, 576, dtype=torch.bfloat16, device=cuda)
    turn = KvWrite(angles.cos(), angles.sin(), positions, torch.arange(tokens, device=cuda) + 64)
    given = latent, LatentNorm(weight), turn
    expected = torch.empty(tokens, heads, 576, dtype=torch.bfloat16, device=cuda)
    mla_write(queries[..., 128:], expected[..., 512:], *given, LatentPlane(planes[0].view(3, 64, 576)))
    poison(cuda)
    absorbed = mla_absorb(queries, uk, *given, LatentPlane(planes[1].view(3, 64, 576)))
    assert torch.equal(planes[0], planes[1]) and torch.equal(absorbed[..., 512:], expected[..., 512:])
    near(absorbed[..., :512], torch.einsum("thn,hnr->thr", queries[..., :128].double(), uk.double()), 4e-3)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "norms"), [(28, 4, 128, False), (64, 8, 128, True), (14, 2, 64, True)]
)
def test_keys_and_values_are_turned_and_stored(
    heads: int, kv_heads: int, dim: int, norms: bool, fp8: bool, cuda: torch.device
) -> None:
    from thalweg.kernels.rope.triton import QkNorms, gqa_write

    generator, tokens = torch.Generator().manual_seed(SEED), 5
    qkv = normal(generator, tokens, heads + 2 * kv_heads, dim, dtype=torch.bfloat16).to(cuda)
    q, k, v = torch.split(qkv.clone(), [heads, kv_heads, kv_heads], 1)
    angles = (normal(generator, 30, dim // 2) * 9).to(cuda)
    cos, sin = angles.cos(), angles.sin()
    weights = QkNorms(*(normal(generator, dim).to(cuda) for _ in range(2))) if norms else QkNorms()
    positions, write = torch.tensor([3, 29, 0, 0, 7], device=cuda), torch.tensor([70, 191, 64, 3, 100], device=cuda)
    planes = torch.zeros(2, 192, kv_heads, dim, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device=cuda)
    scales = [torch.tensor([0.03], device=cuda) if fp8 else None] * 2
    kv = KvPlanes(planes[0], planes[1], *scales)
    gqa_write(q, k, v, weights, KvWrite(cos, sin, positions, write), kv)
    c, s = cos[positions].double()[:, None], sin[positions].double()[:, None]
    query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
    if norms:
        query, key = normed(query, weights.query_d), normed(key, weights.key_d)
    near(q, turned(query, c, s), 4e-3)
    near(k, turned(key, c, s), 4e-3)
    for plane, exact in ((planes[0], turned(key, c, s)), (planes[1], value.double())):
        kept(plane[write], exact, 0.03 if fp8 else 1.0)
        assert int((plane.float().abs().sum((1, 2)) > 0).sum()) == tokens, "no other row is written"


@pytest.mark.parametrize("fp8", [False, True])
def test_what_is_stored_is_finite(fp8: bool, cuda: torch.device) -> None:
    """NaN and infinities of one request do not stay in pages that another gets; and do not touch the other rows."""
    from thalweg.kernels.gqa import triton as gqa
    from thalweg.kernels.rope import triton as rope

    generator, dtype = torch.Generator().manual_seed(SEED), torch.float8_e4m3fn if fp8 else torch.bfloat16
    scale = torch.tensor([0.03], device=cuda) if fp8 else None
    write, positions = torch.tensor([70, 130, 200], device=cuda), torch.tensor([6, 2, 8], device=cuda)
    angles, weight = normal(generator, 30, 64).to(cuda), normal(generator, 512).to(cuda)
    turn = KvWrite(angles.cos(), angles.sin(), positions, write)
    short = KvWrite(*(x[:, :32].contiguous() for x in turn[:2]), positions, write)
    down = normal(generator, 3, 16 * 192 + 576, dtype=torch.bfloat16).to(cuda)
    uk = normal(generator, 16, 128, 512, dtype=torch.bfloat16).to(cuda)
    qkv = normal(generator, 3, 16, 128, dtype=torch.bfloat16).to(cuda)
    own = normal(generator, 3, 4, 320, dtype=torch.bfloat16).to(cuda)

    def stored(bad: float) -> list[Tensor]:
        """The planes, by every kernel that writes into them; token 1 is spoilt."""
        down[1], qkv[1], own[1, 0, ::7] = bad, bad, bad
        queries, latent = down[:, : 16 * 192].view(3, 16, 192), down[:, 16 * 192 :]
        latents = torch.zeros(3, 256, 576, dtype=dtype, device=cuda)
        planes = torch.zeros(6, 4, 64, 4, 128, dtype=dtype, device=cuda)
        wide = torch.zeros(2, 256, 4, 256, dtype=dtype, device=cuda)
        given = rope.LatentNorm(weight), short
        held = [LatentPlane(plane.view(4, 64, 576), scale) for plane in latents]
        for plane, in_place in zip(held, (False, True), strict=False):
            copy, turning = latent.clone(), queries[..., 128:].clone()
            rope.mla_write(turning, turning.clone(), copy, *given, plane, in_place=in_place)
            assert not in_place or copy.isfinite().all()
        rope.mla_absorb(queries, uk, latent, *given, held[2])
        norms = weight[:128].contiguous()
        for i, normed in enumerate((rope.QkNorms(), rope.QkNorms(norms, norms))):
            q, k, v = torch.split(qkv.clone(), [8, 4, 4], 1)
            rope.gqa_write(q, k, v, normed, turn, KvPlanes(*planes[2 * i : 2 * i + 2], scale, scale))
            assert k.isfinite().all() and v.isfinite().all(), "the next row's attention multiplies them by 0"
        q, k, v = torch.split(qkv.clone(), [8, 4, 4], 1)
        rows = DecodeRows(torch.tensor([[1], [2], [3]], dtype=torch.int32, device=cuda), positions)
        new = gqa.NewTokens(k, v, turn, rope.QkNorms())
        gqa.decode(q, KvPlanes(*planes[4:], scale, scale), rows, scale=0.09, splits=1, new=new)
        parts = own[..., :128].contiguous(), own[..., 128:256].contiguous(), own[:, 0, 256:]
        rope.mha_write(queries[:, :0], *parts, short, KvPlanes(*wide, scale, scale))
        return [latents, planes, wide]

    fine = stored(1.0)
    for bad in (torch.nan, torch.inf, -torch.inf, torch.finfo(torch.bfloat16).max):
        for got, want in zip(stored(bad), fine, strict=True):
            assert got.float().isfinite().all(), bad
            spoilt_NS = (got.float() != want.float()).view(len(got), 256, -1).any(-1)
            assert spoilt_NS.any(1).all() and spoilt_NS.any(0).nonzero().flatten().tolist() == [130]


def test_prefix_chunks_join_to_the_whole(cuda: torch.device) -> None:
    """Causal attention to a row's own tokens, joined with attention to a prefix gathered from pages, is attention to
    all of it.
    """
    from thalweg.kernels.attend.triton import merge_state_
    from thalweg.kernels.mla import triton

    generator, heads, prefix, own = torch.Generator().manual_seed(SEED), 4, 200, 130
    table, pages = page_table(generator, (prefix + own, 1))
    plane = normal(generator, pages, 64, 576, dtype=torch.bfloat16).to(cuda)
    table = table.to(cuda)[:1]
    kv = (normal(generator, 576, heads * 256, dtype=torch.bfloat16) * 0.05).to(cuda)
    q = normal(generator, own, heads, 192, dtype=torch.bfloat16).to(cuda)

    def part(first: int, tokens: int, causal: bool) -> tuple[Tensor, Tensor]:
        begins, firsts = (torch.tensor(x, dtype=torch.int32, device=cuda) for x in ((0, tokens), (first,)))
        latents = triton.gather(LatentPlane(plane), table, ContextChunk(firsts, begins, tokens + 9, tokens), 512)
        flat = plane[table[0].long()].flatten(0, 1)[first : first + tokens]
        assert torch.equal(latents[:tokens], flat) and not latents[tokens:].any()
        key, value = (latents @ kv).view(-1, heads, 256).split(128, -1)
        starts = torch.tensor((0, own), dtype=torch.int32, device=cuda)
        rows = RaggedRows(starts, begins, own, tokens, causal)
        return triton.prefill(q, key, latents[:, 512:], value, rows, scale=0.07)

    whole, whole_lse = part(0, prefix + own, True)
    out, lse = part(192, prefix + own - 192, True)
    merge_state_(out, lse, *part(0, 192, False))
    near(out, whole.double(), 2e-2)
    near(lse, whole_lse.double(), 1e-3)
