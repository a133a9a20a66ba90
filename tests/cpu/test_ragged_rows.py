"""What a captured step reads of its rows: `runner.ragged_graphs` on a CPU, without the graphs."""

from __future__ import annotations

from itertools import pairwise

import torch

from thalweg.batch.batch import Batch, Group, RowExtent, TreeMask
from thalweg.core.plan import PAGE
from thalweg.runner.ragged_graphs import PROMPTS, CapturedRows, RaggedGraph
from thalweg.runner.step_buffers import StepBuffers

CPU = torch.device("cpu")


def step(decode: int, *prompts: tuple[int, int]) -> Batch:
    """A step of decode rows with contexts of 100 tokens, 101, ..., and prompts: (cached tokens, tokens of the step)."""
    extents = [RowExtent(1, 100 + row) for row in range(decode)] + [RowExtent(n, at + n) for at, n in prompts]
    positions = [extent.max_kv_len - extent.query + i for extent in extents for i in range(extent.query)]
    tokens, pages = len(positions), -(-max(extent.max_kv_len for extent in extents) // PAGE)
    table = torch.arange(1, 1 + len(extents) * pages, dtype=torch.int32).view(len(extents), pages)
    starts = [sum(extent.query for extent in extents[:row]) for row in range(len(extents))]
    ragged = [Group(row, 1, starts[row], *extents[row]) for row in range(decode, len(extents))]
    groups = ([Group(0, decode, 0, 1, 99 + decode)] if decode else []) + ragged
    ids, real = torch.arange(tokens) + 7, torch.ones(tokens, dtype=torch.bool)
    return Batch(ids, torch.tensor(positions), ids + 1000, table, real, ids[:1], tuple(groups), tuple(extents))


def test_rows_of_an_earlier_step_leave_nothing() -> None:
    rows = CapturedRows(8, 1000, CPU)
    for batch, decode in ((step(5, (64, 70), (0, 9)), 5), (step(2, (130, 3)), 2), (step(0, (0, 4), (1, 1)), 0)):
        rows.bind(batch, decode, 8)
        prompts = batch.extents[decode:]
        lengths = [(b - a, d - c) for (a, c), (b, d) in pairwise(rows.starts_2N.t().tolist())]
        assert lengths == [tuple(extent) for extent in prompts] + [(0, 0)] * (PROMPTS - len(prompts))
        assert rows.starts_N1[0] == decode and rows.starts_N1[-1] == len(batch.ids_T)
        width = batch.table_RP.shape[1]
        assert torch.equal(rows.table_NP[: len(prompts), :width], batch.table_RP[decode:])
        assert torch.equal(rows.decode_table_DP[:decode, :width], batch.table_RP[:decode])
        assert rows.decode_positions_D.tolist() == [99 + i for i in range(decode)] + [0] * (8 - decode)
        assert not rows.decode_table_DP[decode:].any()


def test_padding_has_no_row_beyond_its_pages() -> None:
    rows = CapturedRows(8, 100, CPU)
    for tokens, starts in ((250, [0, 100, 200, 250]), (100, [0, 100]), (1700, [100 * row for row in range(17)])):
        rows.pad(tokens)
        assert rows.starts_N1.tolist() == starts + starts[-1:] * (PROMPTS + 1 - len(starts))
        assert torch.equal(rows.context_starts_N1, rows.starts_N1)


def test_what_fits() -> None:
    def graph(tokens: int, decode: int, cached: int) -> RaggedGraph:
        rows = CapturedRows(decode, 9999, CPU)
        return RaggedGraph(tokens, decode, cached, None, StepBuffers(tokens, CPU), rows)  # type: ignore[arg-type]

    small, large, alone = graph(256, 8, 512), graph(1024, 8, 1024), graph(1024, 0, 0)
    assert small.fits(step(8, (500, 3), (12, 9))) and not small.fits(step(8, (500, 3), (13, 9)))
    assert not small.fits(step(9, (0, 9)))
    assert small.fits(step(0, (0, 9))) and small.fits(step(1, (0, 9))), "few tokens"
    assert large.fits(step(2, (0, 900))) and not large.fits(step(1, (0, 900))), "many rows would be padding"
    assert small.fits(step(0, *[(0, 2)] * PROMPTS)) and not small.fits(step(0, *[(0, 2)] * (PROMPTS + 1)))
    assert alone.fits(step(0, (0, 900))) and not alone.fits(step(0, (1, 900))) and not alone.fits(step(1, (0, 900)))


def test_drafts_are_verified_elsewhere() -> None:
    graph = RaggedGraph(64, 8, 512, None, StepBuffers(64, CPU), CapturedRows(8, 999, CPU))  # type: ignore[arg-type]
    batch = step(2, (0, 9))
    values = {name: getattr(batch, name) for name in Batch.__dataclass_fields__}
    tree = TreeMask(batch.positions_T, torch.full_like(batch.positions_T, -1), 2)
    assert graph.fits(Batch(**values))
    assert not graph.fits(Batch(**values | {"verifies": True})) and not graph.fits(Batch(**values | {"tree": tree}))


def test_tokens_are_padded() -> None:
    shared = StepBuffers(32, CPU)
    for tensor in (shared.ids_T, shared.positions_T, shared.write_T):
        tensor.fill_(99)
    shared.real_T.fill_(True)
    batch = step(1, (0, 9))
    shared.fill(batch, 16)
    assert torch.equal(shared.ids_T[:10], batch.ids_T) and torch.equal(shared.write_T[:10], batch.write_T)
    assert not shared.ids_T[10:16].any() and not shared.write_T[10:16].any() and not shared.real_T[10:16].any()
    assert shared.ids_T[16] == 99
