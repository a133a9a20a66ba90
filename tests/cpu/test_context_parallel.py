"""Context parallelism: how tokens are divided, and that two ranks give one rank's outputs and the same cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cpu.batches import Bench
from tests.cpu.ranks import layouts, on_ranks
from tests.cpu.test_sharded_engine import (
    PROMPTS,
    case,
    config_of,
    differences,
    run_steps,
    runner_of,
    steps_of_one_rank,
)
from tests.cpu.test_sharded_models import IDS, SHAPES, loaded, run, same, written
from thalweg.attention import exchange
from thalweg.batch.batch import Batch, Group, RowExtent, TokenShare, TreeMask
from thalweg.batch.share import Segment, divide, divided
from thalweg.config.context_parallel import INTERLEAVE, STRATEGIES, ZIGZAG
from thalweg.core.plan import PAGE
from thalweg.memory.planes import Planes
from thalweg.models import traced
from thalweg.runner.step_buffers import StepBuffers

EVERY = [(ranks, strategy) for ranks in (2, 3, 4) for strategy in STRATEGIES]


def tokens_of(share: Sequence[Segment]) -> list[tuple[int, int]]:
    return [(s.row, i) for s in share for i in range(s.first, s.first + s.length)]


@pytest.mark.parametrize(("ranks", "strategy"), EVERY)
def test_every_token_has_one_rank_and_no_rank_has_more_than_its_part(ranks: int, strategy: str) -> None:
    draw = random.Random(ranks)
    for _ in range(300):
        leading = draw.choice((0, 1, 2, ranks, 7))
        same_length = draw.random() < 0.5
        queries = [3 if same_length else draw.randint(1, 6) for _ in range(leading)]
        queries += [draw.choice((1, 2, 5, 48, 300, 1000)) for _ in range(draw.randint(not leading, 4))]
        shares = divide(queries, leading, ranks, strategy)
        every = sorted(token for share in shares for token in tokens_of(share))
        assert every == [(row, i) for row, query in enumerate(queries) for i in range(query)]
        assert max(len(tokens_of(share)) for share in shares) <= -(-sum(queries) // ranks)
        for share in shares:
            assert tokens_of(share) == sorted(tokens_of(share)), "rows whose bounds are inexact come first"
            assert all(s.length in (1, queries[s.row]) for s in share if s.row < leading)


@pytest.mark.parametrize(("ranks", "strategy"), EVERY)
@pytest.mark.parametrize("queries", [(8192,), (4096, 5000)])
def test_ranks_have_equal_causal_work(ranks: int, strategy: str, queries: tuple[int, ...]) -> None:
    work = [sum(i + 1 for _, i in tokens_of(share)) for share in divide(queries, 0, ranks, strategy)]
    assert max(work) < 1.1 * sum(work) / ranks


def test_consecutive_parts_would_not_have() -> None:
    """The test above is worth nothing if any division passed it."""
    parts = [range(i * 4096, (i + 1) * 4096) for i in range(2)]
    assert max(map(sum, parts)) > 1.1 * sum(map(sum, parts)) / 2


def test_strategies() -> None:
    rounds = [[(s.first, s.length) for s in share] for share in divide((512,), 0, 2, INTERLEAVE)]
    assert rounds == [[(0, 128), (256, 128)], [(128, 128), (384, 128)]]
    assert [(s.first, s.length) for s in divide((512,), 0, 2, ZIGZAG)[0]] == [(0, 128), (384, 128)]
    assert [(s.first, s.length) for s in divide((512,), 0, 2, ZIGZAG)[1]] == [(128, 256)]


def test_rows_of_which_all_ranks_get_equally_many_stay_whole() -> None:
    assert divide((4, 4, 4, 4), 4, 2, INTERLEAVE) == [
        [Segment(0, 0, 4), Segment(2, 0, 4)],
        [Segment(1, 0, 4), Segment(3, 0, 4)],
    ]
    assert [len(share) for share in divide((4, 4, 4), 3, 2, INTERLEAVE)] == [6, 6]


class Ranks(SimpleNamespace):
    """Ranks whose tensors are given beforehand."""

    size: int
    rank: int
    parts: list[torch.Tensor]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.equal(self.parts[self.rank], x)
        return torch.stack(self.parts)


def batch_of(rows: Sequence[tuple[int, int]], groups: int, **fields: Any) -> Batch:
    """rows: tokens before, and of the step. groups: of rows, each of one length."""
    tokens = sum(n for _, n in rows)
    made, row, token = list[Group](), 0, 0
    for _ in range(groups):
        many = len(rows) if groups == 1 else 1
        n = rows[row][1]
        made.append(Group(row, many, token, n, max(at + n for at, n in rows[row : row + many])))
        row, token = row + many, token + many * n
    positions = torch.tensor([at + i for at, n in rows for i in range(n)])
    return Batch(
        ids_T=torch.arange(tokens) + 100,
        positions_T=positions,
        write_T=torch.arange(tokens) + PAGE,
        table_RP=torch.arange(len(rows)).view(-1, 1) + 1,
        real_T=torch.ones(tokens, dtype=torch.bool),
        logits_indices_N=torch.zeros(0, dtype=torch.int64),
        groups=tuple(made),
        extents=tuple(RowExtent(n, at + n) for at, n in rows),
        **fields,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("rows", "groups", "fields"),
    [
        ([(30, 1), (9, 1), (0, 1), (70, 1), (3, 1)], 1, {}),
        ([(30, 4), (9, 4), (5, 4), (8, 4), (2, 4), (1, 4)], 1, {"verifies": True}),
        ([(30, 4), (9, 4)], 1, {"verifies": True}),
        ([(7, 1), (0, 41), (64, 30)], 3, {}),
        ([(0, 1)], 1, {}),
    ],
)
def test_a_share_holds_its_tokens_and_the_parts_are_the_whole(
    rows: list[tuple[int, int]], groups: int, fields: dict[str, Any], ranks: int, strategy: str
) -> None:
    """The numbers of even steps are made on the device, those of others on the host."""
    batch = batch_of(rows, groups, **fields)
    tokens = len(batch.ids_T)
    every = [divided(batch, Ranks(size=ranks, rank=rank, parts=[]), strategy) for rank in range(ranks)]
    parts = [own.batch.ids_T for own in every]
    for rank, own in enumerate(every):
        share, each = own.batch, -(-tokens // ranks)
        assert len(share.ids_T) == each and torch.equal(own.take(batch.ids_T), share.ids_T)
        assert own.ranks is not None and share.share is not None and share.shares_slots
        assert isinstance(own.ranks, Ranks)
        own.ranks.parts = parts
        assert torch.equal(own.whole(share.ids_T), batch.ids_T)
        written = share.share.write_all.view(ranks, each)
        assert torch.equal(written[rank], share.write_T), "where each rank writes, in rank order"
        assert sorted(written.flatten().tolist())[-tokens:] == batch.write_T.tolist()
        assert sum(group.rows for group in share.groups) == len(share.extents) == len(share.table_RP)
        assert sum(extent.query for extent in share.extents) == each
        token = 0
        for extent, table in zip(share.extents, share.table_RP.tolist(), strict=True):
            ids, real = share.ids_T[token : token + extent.query], share.real_T[token : token + extent.query]
            assert bool(real.all()) == bool(real.any()), "padding has rows of its own"
            if real.any():
                row = table[0] - 1
                before, n = rows[row]
                first = sum(query for _, query in rows[:row])
                assert all(first <= i < first + n for i in (ids - 100).tolist()), "the pages of its row"
                last = int(share.positions_T[token + extent.query - 1])
                exact = extent.max_kv_len == last + 1
                assert exact or (extent.max_kv_len == before + n and last < extent.max_kv_len)
                assert exact or row < batch.groups[0].rows and batch.verifies
            else:
                assert table == [0] and extent == RowExtent(1, 1)
            token += extent.query
    again = divided(every[0].batch, every[0].ranks, strategy)  # type: ignore[arg-type]
    assert again.batch is every[0].batch and again.whole(parts[0]) is parts[0], "a share is not divided again"


def test_trees_stay_whole_or_are_divided_node_by_node() -> None:
    for rows in (2, 1):
        nodes = torch.arange(3 * rows)
        batch = batch_of([(5, 3)] * rows, 1, tree=TreeMask(nodes + 5, -nodes - 1, rows))
        for rank in range(2):
            own = divided(batch, Ranks(size=2, rank=rank, parts=[]), INTERLEAVE).batch
            assert own.tree is not None
            assert own.tree.rows == (1 if rows == 2 else 2 - rank)
            real = own.real_T
            assert torch.equal(own.tree.columns_T[real], own.ids_T[real] - 95)
            assert torch.equal(own.tree.tree_mask_T, torch.where(real, 99 - own.ids_T, -1))
    prompt = batch_of([(5, 3), (0, 40)], 2, tree=TreeMask(torch.arange(43), torch.full((43,), -1), 1))
    own = divided(prompt, Ranks(size=4, rank=3, parts=[]), INTERLEAVE).batch
    assert own.tree is None, "no node is here"


def test_a_prompt_as_long_as_the_trees_beside_it_is_divided_as_a_prompt() -> None:
    """They are one group then: the prompt's context is known, that of trees is not."""
    rows, nodes = [(5, 4), (9, 4), (0, 4)], torch.arange(12)
    tree = TreeMask(nodes, torch.full((12,), -1), 2)
    for rank in range(2):
        own = divided(batch_of(rows, 1, tree=tree), Ranks(size=2, rank=rank), INTERLEAVE).batch
        assert len(own.table_RP) == len(own.extents) == sum(group.rows for group in own.groups)
        assert sum(extent.query for extent in own.extents) == len(own.ids_T) == 6


def test_buffers_of_captured_steps_hold_where_all_ranks_write() -> None:
    ranks = Ranks(size=2, rank=1, parts=[])
    buffers = StepBuffers(16, torch.device("cpu"), ranks)
    own = divided(batch_of([(0, 10)], 1), ranks, INTERLEAVE).batch
    buffers.fill(divided(batch_of([(0, 30)], 1), ranks, INTERLEAVE).batch, 16)
    buffers.fill(own, 8)
    share = buffers.share(8)
    assert share is not None and own.share is not None
    want = torch.nn.functional.pad(own.share.write_all.view(2, 5), (0, 3))
    assert torch.equal(share.write_all.view(2, 8), want) and torch.equal(share.write_all.view(2, 8)[1, :5], own.write_T)
    assert StepBuffers(16, torch.device("cpu")).share(8) is None


# ---- models and engines on ranks that are threads ----


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", ["v3-fp8", "v3.2", "one-key-head", "qwen3-moe"])
def test_ranks_that_divide_tokens_give_one_ranks_logits(shape: str, strategy: str, tmp_path: Path) -> None:
    ranks = layouts(cp=2, ep=1 if shape == "one-key-head" else 2, strategy=strategy)
    folder = written(tmp_path, SHAPES[shape])
    want = run(loaded(folder), IDS)
    got = on_ranks(2, lambda rank: run(loaded(folder, ranks[rank]), IDS))
    same(got[0], want)
    assert torch.equal(got[0], got[1])


def cache_of(planes: Planes) -> dict[tuple[str, int], torch.Tensor]:
    """Without the null page, where padding is written in any order."""
    return {key: plane[1:] for key, plane in planes.bytes.items()}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "ROWS", 0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["v3-fp8-nextn-tree", "v3.2-nextn", "qwen-eagle3", "qwen-eagle3-tree"])
def test_ranks_give_one_ranks_outputs_and_hold_the_same_cache(name: str, strategy: str, tmp_path: Path) -> None:
    config, has_experts = case(name, tmp_path), name.startswith("v3")
    ranks = layouts(cp=2, ep=2 if has_experts else 1, strategy=strategy)
    steps = steps_of_one_rank(config, PROMPTS)
    runners = [runner_of(config, layout) for layout in ranks]
    for got in on_ranks(2, lambda rank: run_steps(runners[rank], steps)):
        assert not differences(got, steps)
    mine, theirs = (cache_of(runner.planes) for runner in runners)
    assert all(plane.any() and torch.equal(plane, theirs[key]) for key, plane in mine.items())


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kv", ["fp8_e4m3", "fp8_ds_mla"])
def test_an_fp8_cache_is_the_same_on_all_ranks(kv: str, tmp_path: Path) -> None:
    shape = "v3.2" if kv == "fp8_ds_mla" else "v3"
    folder = written(tmp_path, SHAPES[shape] | {"kv_lora_rank": 128})
    config, ranks = config_of(folder, kv_cache_dtype=kv), layouts(cp=2, ep=2)
    steps = steps_of_one_rank(config, PROMPTS)
    runners = [runner_of(config, layout) for layout in ranks]
    got = on_ranks(2, lambda rank: run_steps(runners[rank], steps))
    assert got[0] == got[1]
    mine, theirs = (cache_of(runner.planes) for runner in runners)
    assert all(plane.any() and torch.equal(plane, theirs[key]) for key, plane in mine.items())


def _no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "put", lambda *given: None)


def _other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the ranks write, in another order than what they have stored."""
    put = exchange.put
    monkeypatch.setattr(exchange, "put", lambda entries, rows, parts: put(entries, rows.roll(1), parts))


def _own_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenShare, "write_all", property(lambda self: tuple.__getitem__(self, 1) * 0))


@pytest.mark.parametrize("plant", [_no_exchange, _other_order, _own_rows_alone])
def test_planted_bugs_change_logits(plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, folder = layouts(cp=2), written(tmp_path, SHAPES["one-key-head"])
    want = run(loaded(folder), IDS)
    plant(monkeypatch)
    got = on_ranks(2, lambda rank: run(loaded(folder, ranks[rank]), IDS))
    assert float((got[0] - want).abs().max() / want.abs().max()) > 0.01


def test_four_ranks_divide_heads_and_tokens(tmp_path: Path) -> None:
    folder, ranks = written(tmp_path, SHAPES["v3-fp8"]), layouts(tp=2, cp=2, ep=4)
    want = run(loaded(folder), IDS)
    got = on_ranks(4, lambda rank: run(loaded(folder, ranks[rank]), IDS))
    same(got[0], want)
    assert all(torch.equal(got[0], other) for other in got[1:])


def test_ranks_with_requests_of_their_own_divide_tokens(tmp_path: Path) -> None:
    """Two data-parallel ranks, each of two that divide its tokens: all four share the experts."""
    folder, ranks = written(tmp_path, SHAPES["v2-lite"]), layouts(dp=2, cp=2, ep=4)
    texts, whole = [IDS, IDS[::-1]], loaded(folder)
    got = on_ranks(4, lambda rank: run(loaded(folder, ranks[rank]), texts[rank // 2]))
    for rank, logits in enumerate(got):
        same(logits, run(whole, texts[rank // 2]))
    assert torch.equal(got[0], got[1]) and torch.equal(got[2], got[3])


def test_fewer_tokens_than_ranks(tmp_path: Path) -> None:
    folder, ranks = written(tmp_path, SHAPES["one-key-head"]), layouts(cp=3)

    def logits(layout: Any = None) -> torch.Tensor:
        bench = Bench(loaded(folder) if layout is None else loaded(folder, layout), 1)
        return torch.cat([bench.step([(0, part)])[0] for part in (IDS[:2], IDS[2:3], IDS[3:8])])

    want = logits()
    got = on_ranks(3, lambda rank: logits(ranks[rank]))
    same(got[0], want)
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])
