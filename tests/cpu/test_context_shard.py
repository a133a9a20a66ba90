"""Decode context parallelism: which rank stores what, and that parts of a context merge to attention to all of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cpu.ranks import Rendezvous, ThreadAxis, layouts, on_ranks
from tests.cpu.test_sharded_models import IDS, SHAPES, loaded, run, same, written
from thalweg.attention.context_shard import ContextShard, attend_packed, pack_state, unpack_state
from thalweg.attention.selection import select_top_k
from thalweg.core.plan import PAGE
from thalweg.kernels.attend.ref import attend
from thalweg.layers.sharded_mla import ShardedIndexer
from thalweg.memory.planes import Planes, vector_plane
from thalweg.parallel.axis import SINGLE


def shards(size: int) -> list[ContextShard]:
    rendezvous = Rendezvous(size)
    return [ContextShard(ThreadAxis(rendezvous, rank) if size > 1 else SINGLE) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_token_is_stored_once(size: int) -> None:
    ranks, places = shards(size), torch.arange(5 * PAGE * size)
    rows = torch.stack([shard.rows(places) for shard in ranks])
    owner, row = ranks[0].owner(places), places // (PAGE * size) * PAGE + places % PAGE
    assert owner.tolist() == [place // PAGE % size for place in range(len(places))]
    for rank, shard in enumerate(ranks):
        own = owner == rank
        assert torch.equal(rows[rank, own], row[own]) and len(set(rows[rank, own].tolist())) == int(own.sum())
        assert not (rows[rank, ~own] // PAGE).any(), "the null page"
        assert torch.equal(shard.positions(shard.stored(places[own])), places[own])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pages_of_all_ranks_are_in_the_order_of_positions(size: int) -> None:
    ranks, pages = shards(size), 3

    def gathered(rank: int) -> torch.Tensor:
        stored = ranks[rank].positions(torch.arange(pages * PAGE))
        return ranks[rank].gather_context(torch.stack((stored, stored + 1000)).unsqueeze(-1))

    want = torch.arange(pages * PAGE * size)
    for got in on_ranks(size, gathered):
        assert torch.equal(got[0, :, 0], want) and torch.equal(got[1, :, 0], want + 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_survive_packing(dtype: torch.dtype) -> None:
    out, lse = torch.randn(3, 4, 8).to(dtype), torch.tensor([[-torch.inf, 1e-3, 7.123456, -80.0]]).expand(3, 4)
    got, got_lse = unpack_state(pack_state(out, lse))
    assert torch.equal(got, out) and torch.equal(got_lse, lse)


@pytest.mark.parametrize(("size", "visible"), [(2, 5 * PAGE - 7), (2, 9), (3, PAGE + 1), (4, 1)])
def test_parts_merge_to_attention_to_the_whole_context(size: int, visible: int) -> None:
    """A short context leaves some ranks without any token."""
    heads, dim, value, tokens = 3, 16, 8, 6 * PAGE
    generator = torch.Generator().manual_seed(size)
    query = torch.randn(2, heads * size, dim, generator=generator) * 3
    key = torch.randn(2, tokens // size * size, dim, generator=generator) * 3
    key = key[:, : tokens // (PAGE * size) * PAGE * size]
    bias = torch.where(torch.arange(key.shape[1]) < visible, 0.0, -torch.inf).view(1, 1, -1)
    want, ranks = attend(query, key, key[..., :value], bias, 0.25), shards(size)

    def merged(rank: int) -> torch.Tensor:
        shard = ranks[rank]
        own = shard.positions(torch.arange(key.shape[1] // size))
        every = shard.gather_heads(query[:, rank * heads : (rank + 1) * heads])
        return shard.merge(attend_packed(every, key[:, own], key[:, own, :value], bias[..., own], 0.25))

    for rank, got in enumerate(on_ranks(size, merged)):
        torch.testing.assert_close(got, want[:, rank * heads : (rank + 1) * heads], rtol=1e-5, atol=1e-6)


def test_entries_move_between_ranks() -> None:
    """All are read before any is written; what moves into the null page is dropped."""
    ranks, specs = shards(2), (vector_plane("latent", 0, 3, torch.float32), vector_plane("index", 0, 2, torch.bfloat16))
    size, pages = 2 * PAGE, 4
    from_M = torch.tensor([size + 70, size + 5, 3 * size + 127, 2 * size, 0])
    to_M = torch.tensor([size + 5, size + 70, size + 1, 3 * size + 65, 0])
    filled = [torch.arange(pages * size, dtype=torch.float32) % 251 + part for part in (0.0, 1.0)]

    def moved(rank: int) -> list[torch.Tensor]:
        planes, shard, own = Planes(specs, pages), ranks[rank], ranks[rank].positions(torch.arange(pages * PAGE))
        for spec, values in zip(specs, filled, strict=True):
            plane = planes.tokens(spec.name, 0)
            plane.copy_(values[own].unsqueeze(1).expand_as(plane))
        entries = [part for spec in specs for part in planes.entries(spec.name, spec.layer)]
        shard.put(entries, to_M, shard.take(entries, from_M))
        last = shard.take(entries, from_M[1])
        assert [len(part) for part in last] == [12, 4]
        return [shard.gather_context(planes.tokens(spec.name, 0).unsqueeze(0))[0].float() for spec in specs]

    for values, got in zip(filled, on_ranks(2, moved)[1], strict=True):
        want = values.clone()
        want[to_M] = values[from_M]
        assert torch.equal(got[size:, 0], want[size:]) and torch.equal(got[size:, -1], want[size:])


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ("v3", {"tp": 2, "dcp": 2}),
        ("v3.2", {"tp": 2, "dcp": 2}),
        ("v3.2", {"tp": 4, "ep": 4, "dcp": 2}),
        ("v2-lite", {"tp": 4, "dcp": 4}),
        ("one-key-head", {"tp": 4, "dcp": 2}),
        ("one-key-head", {"tp": 4, "dcp": 4}),
    ],
    ids=str,
)
def test_ranks_that_share_contexts_give_one_ranks_logits(shape: str, layout: dict[str, int], tmp_path: Path) -> None:
    """A long prompt in chunks, single tokens, and sparse attention beyond the indexer's choice."""
    folder, ranks, ids = written(tmp_path, SHAPES[shape]), layouts(**layout), IDS * 3
    want = run(loaded(folder), ids)
    got = on_ranks(len(ranks), partial(_run, folder, ranks, ids))
    same(got[0], want)
    assert all(torch.equal(other, got[0]) for other in got)


def _run(folder: Path, ranks: list, ids: list[int], rank: int) -> torch.Tensor:
    return run(loaded(folder, ranks[rank]), ids)


def test_the_first_of_equal_scores_is_chosen_whichever_rank_has_it() -> None:
    scores = torch.zeros(1, 2 * 2 * PAGE)
    scores[0, [PAGE + 6, 2 * PAGE + 2]] = 1.0  # of rank 1, and of rank 0
    ranks = shards(2)

    def work(rank: int) -> list[list[int]]:
        own = scores[:, ranks[rank].positions(torch.arange(2 * PAGE))]
        indexer: Any = SimpleNamespace(selection=select_top_k, topk=1, shard=ranks[rank])
        return ShardedIndexer._choose(indexer, own, torch.zeros_like(own))[0].tolist()

    assert on_ranks(2, work) == [[[PAGE + 6]]] * 2
