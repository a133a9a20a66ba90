"""Attention metadata of a step on pages: contexts in one piece where they fit, otherwise in chunks beside the step's
own tokens.
"""

from __future__ import annotations

import pytest
import torch

from thalweg.batch.batch import Batch, Group, RowExtent
from thalweg.core.plan import PAGE
from thalweg.layers import paged
from thalweg.layers.paged import PagedMetadataBuilder, PagedStep
from thalweg.memory.planes import FP8, Planes, vector_plane

ROWS = [(99, 1), (64, 9), (0, 20), (200, 7)]  # tokens before the step, tokens of it: one decodes, three are prompts'


def step(dtype: torch.dtype = torch.bfloat16, rows: list[tuple[int, int]] = ROWS, gathers: bool = True) -> PagedStep:
    tokens = sum(n for _, n in rows)
    zeros_T = torch.zeros(tokens, dtype=torch.int64)
    groups = tuple(Group(i, 1, sum(n for _, n in rows[:i]), n, at + n) for i, (at, n) in enumerate(rows))
    extents = tuple(RowExtent(n, at + n) for at, n in rows)
    table_RP = torch.zeros(len(rows), 4, dtype=torch.int32)
    batch = Batch(zeros_T, zeros_T, zeros_T, table_RP, zeros_T == 0, zeros_T[:1], groups, extents)
    steps = PagedMetadataBuilder.__new__(PagedMetadataBuilder)
    torch.nn.Module.__init__(steps)
    for name in ("cos", "sin"):
        steps.register_buffer(name, torch.zeros(1, 1))
    steps.prepare, steps.gathers = paged.nothing, gathers
    steps.topk, steps.page = None, PAGE
    return steps.build(batch, Planes((vector_plane("latent", 0, 8, dtype),), 2))


def test_contexts_that_fit_are_one_piece_with_the_tokens_of_the_step() -> None:
    made = step()
    assert made.decode == 1 and made.rest is not None and made.rest.token == 1 and made.prefixes == ()
    assert made.whole is not None
    assert made.whole.starts_R1.tolist() == [0, 73, 93, 300]
    assert made.whole.first_R.tolist() == [0, 0, 0]
    assert (made.whole.tokens, made.whole.max_tokens) == (300, 207)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_what_does_not_fit_or_was_rounded_comes_in_chunks_of_what_is_cached(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype != FP8:
        monkeypatch.setattr(paged, "CHUNK", 299)
    made = step(dtype)
    assert made.whole is None and made.prefixes
    lengths = [chunk.starts_R1.diff().tolist() for chunk in made.prefixes]
    assert [sum(each) for each in zip(*lengths, strict=True)] == [64, 0, 200]
    if dtype != FP8:
        assert [chunk.first_R.tolist() for chunk in made.prefixes] == [[0] * 3, [128] * 3]


@pytest.mark.parametrize("rows", [[(99, 1)], [(0, 20), (0, 7)]])
def test_where_nothing_is_cached_there_is_nothing_to_gather(rows: list[tuple[int, int]]) -> None:
    made = step(rows=rows)
    assert made.whole is None and made.prefixes == ()


def test_a_backend_that_reads_pages_is_told_of_no_context() -> None:
    made = step(gathers=False)
    assert made.rest is not None and any(made.rest.cached) and made.whole is None and made.prefixes == ()
