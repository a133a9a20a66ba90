"""Plain PyTorch attention over rows of very different contexts: tiles stay within their bound and change no number."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cpu import reference_model, zoo
from thalweg.attention import context
from thalweg.attention.context import AttentionMetadataBuilder, WorkspaceNeed
from thalweg.batch.batch import Batch, Group, RowExtent
from thalweg.core.plan import PAGE
from thalweg.memory.planes import Planes
from thalweg.models.catalog import read_facts

TINY = Path(__file__).parents[2] / "models" / "tiny"


def batch(reaches: list[int], query: int = 1) -> Batch:
    """Rows of these contexts, each on pages of its own."""
    rows, pages = len(reaches), -(-max(reaches) // PAGE)
    table_RP = 1 + torch.arange(rows * pages).view(rows, pages)
    positions_Rq = torch.tensor(reaches).unsqueeze(1) - query + torch.arange(query)
    page_Rq = table_RP.gather(1, positions_Rq // PAGE)
    return Batch(
        ids_T=torch.arange(rows * query) + 10,
        positions_T=positions_Rq.flatten(),
        write_T=(page_Rq * PAGE + positions_Rq % PAGE).flatten(),
        table_RP=table_RP,
        real_T=torch.ones(rows * query, dtype=torch.bool),
        logits_indices_N=torch.arange(rows * query),
        groups=(Group(0, rows, 0, query, max(reaches)),),
        extents=tuple(RowExtent(query, max_kv_len) for max_kv_len in reaches),
    )


@pytest.mark.parametrize("query", [1, 3])
def test_short_contexts_are_not_padded_to_a_long_one(query: int, monkeypatch: pytest.MonkeyPatch) -> None:
    most, workspace = 1 << 16, WorkspaceNeed(per_pair=16)
    monkeypatch.setattr(context, "TILE_ELEMENTS", most)
    reaches = [60, 100, 70, 8000, *[90] * 200]
    given: Any = SimpleNamespace()
    step = AttentionMetadataBuilder(torch.zeros(8192, 2), workspace).build(batch(reaches, query), given)
    rows = [row for group in step.groups for row in range(group.group.row_start, group.group.row_start + group.rows)]
    assert rows == list(range(len(reaches))) and step.max_kv_len == 8000
    token = 0
    for group in step.groups:
        assert group.group.token_start == token and group.max_kv_len == max(reaches[group.group.row_slice])
        token += group.rows * query
        for tile in group.tiles:
            size = group.rows * (tile.stop - tile.start) * workspace.elements(group.max_kv_len)
            assert size <= most or (group.rows, tile.stop - tile.start) == (1, 1)
    assert token == len(reaches) * query and len(step.groups) < 12


def test_attention_in_tiles_equals_attention_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference_model.build(read_facts(TINY), torch.float32)
    assert isinstance(model, torch.nn.Module)
    zoo.fill(model)
    given = batch([900, 30, 64, 65, 700, 3], query=2)
    planes = [Planes(model.planes(), int(given.table_RP.max()) + 1) for _ in range(2)]
    for plane in zip(*(one.tensors() for one in planes), strict=True):
        filled = torch.randn(plane[0].shape, generator=torch.Generator().manual_seed(1)).to(plane[0].dtype)
        plane[0].copy_(filled), plane[1].copy_(filled)
    with torch.inference_mode():
        whole = model.logits(model.forward(given, planes[0]))
        monkeypatch.setattr(context, "TILE_ELEMENTS", 1 << 12)
        cut = model.logits(model.forward(given, planes[1]))
    assert len(model.metadata.build(given, planes[1]).groups) == 5
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-4)


def test_flashmla_takes_steps_that_reach_a_crossover() -> None:
    pytest.importorskip("triton")
    from thalweg.kernels.attend.args import DecodeRows
    from thalweg.kernels.mla.backends import MlaShape
    from thalweg.kernels.mla.flashmla import Crossover, FlashMlaDecode

    points = Crossover(16, 64), Crossover(64, 8)
    wide, narrow = (FlashMlaDecode(MlaShape(heads, 512, 1.0, False), points) for heads in (128, 16))

    def is_faster(kernel: FlashMlaDecode, tokens: int) -> bool:
        return kernel.is_faster(DecodeRows(torch.zeros(tokens, 1), torch.zeros(tokens)))

    assert is_faster(wide, 8) and not is_faster(wide, 7)
    assert is_faster(narrow, 64) and not is_faster(narrow, 63)
    assert is_faster(FlashMlaDecode(MlaShape(1, 512, 1.0, False)), 1)
