"""Captured attention of decode rows beside eager attention of a prompt equals both at once. CUDA graphs are simulated
by a recorder of PyTorch operations.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.cpu.ranks import layouts, on_ranks
from tests.cpu.recorder import GraphPool
from thalweg.batch.batch import Batch, Group, RowExtent
from thalweg.batch.padding import without_first_group
from thalweg.core.plan import PAGE
from thalweg.parallel.layout import SINGLE_RANK, Layout
from thalweg.runner.captured import halving
from thalweg.runner.piecewise import Piece, Piecewise, PiecewiseGraph, fitting
from thalweg.runner.step_buffers import StepBuffers

CONTEXT, WIDTH, TOKENS = 3 * PAGE, 4, 16


class Layer:
    """Attention of which one sees whose it is: a number of the layer, the token's position, its row's last page, what
    it was given.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def attend(self, step: Batch, x_TX: Tensor, y_TX: Tensor) -> Tensor:
        parts = []
        for group in step.groups:
            tokens, position = group.token_slice, step.positions_T[group.token_slice]
            table = step.table_RP[group.row_slice].repeat_interleave(group.query, 0)
            page = table.gather(1, (position // PAGE).unsqueeze(1))
            parts.append(x_TX[tokens] * y_TX[tokens] + 1000 * self.number + position.unsqueeze(1) + 0.001 * page)
        return torch.cat(parts)


def step(decoding: list[int], prompts: list[tuple[int, int]]) -> Batch:
    """decoding: positions of rows of one token. prompts: (tokens computed, tokens now)."""
    rows = [(position, 1) for position in decoding] + prompts
    positions = torch.tensor([at + i for at, n in rows for i in range(n)])
    table = torch.arange(1, 1 + 3 * len(rows), dtype=torch.int32).view(len(rows), 3)
    groups = [Group(0, len(decoding), 0, 1, CONTEXT)] if decoding else []
    token = len(decoding)
    for row, (at, n) in enumerate(prompts, len(decoding)):
        groups.append(Group(row, 1, token, n, at + n))
        token += n
    places = positions + 7
    extents = tuple(RowExtent(n, at + n) for at, n in rows)
    return Batch(positions, positions, places, table, positions >= 0, positions[:1], tuple(groups), extents)


def recorded(rows: tuple[int, ...], layout: Layout = SINGLE_RANK) -> Piecewise:
    metadata = SimpleNamespace(build=lambda batch, planes: batch)
    model: Any = SimpleNamespace(metadata=metadata, factory=SimpleNamespace(layout=layout))
    planes: Any = SimpleNamespace(device=torch.device("cpu"), slots_nbytes=1)
    shared = StepBuffers(TOKENS, planes.device, layout.cp)
    shared.make_out(torch.empty(TOKENS, WIDTH))
    pieces = PiecewiseGraph(TOKENS, model, shared)
    none: Any = SimpleNamespace(replay=lambda: None)
    pieces.last, pieces.hidden_TH = none, shared.out_TX
    inputs = [(torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)) for _ in range(2)]
    pieces.pieces = [Piece(none, Layer(i).attend, given) for i, given in enumerate(inputs)]
    pieces.attends = tuple(piece.attend for piece in pieces.pieces)
    steps = Piecewise(model, [pieces])
    for many in rows:
        steps.capture(many, CONTEXT, planes, GraphPool())  # type: ignore[arg-type]
    return steps


def test_rows_that_were_recorded_and_prompts_that_were_not_attend_as_one_step_does() -> None:
    steps = recorded((8, 4, 2))
    (pieces,) = steps.recorded
    last = pieces.pieces[-1]
    for decoding, prompts in (
        ([5, 70, 130], [(0, 9)]),
        ([1], [(64, 3), (0, 6)]),
        ([9, 8, 7, 6, 5], [(100, 2)]),
        ([3, 100], []),
        ([], [(10, 5)]),
        (list(range(12)), [(0, 2)]),  # more than are recorded
    ):
        batch = step(decoding, prompts)
        batch = replace(batch, slot_R=torch.arange(len(batch.extents)) + 1)
        count = len(batch.ids_T)
        used = fitting(steps.decoding, batch, TOKENS, pieces.attends)
        assert (used is None) == (not 1 <= len(decoding) <= 8)
        if used is not None:
            assert used.rows == min(many for many in (8, 4, 2) if many >= len(decoding))
        got = steps.forward(batch, None)  # type: ignore[arg-type]
        assert torch.equal(got[:count], last.attend(batch, *(x[:count] for x in last.inputs)))
        if used is not None:
            padding = used.places_2R[:, len(decoding) :]
            assert not padding.any(), "what fills up the rows writes into the null page"
            assert used.real_R.sum() == len(decoding), "and has no part in a slot's hot set"
            assert used.slot_R is not None and used.slot_R[: len(decoding)].tolist() == [*range(1, len(decoding) + 1)]


def test_ranks_that_divide_a_step_attend_as_one_does() -> None:
    """Each has some of the tokens, in a smaller bucket than all together would need."""
    batch, ones = step([5, 70, 130], [(0, 9), (64, 13)]), torch.ones(25, WIDTH)
    ranks = layouts(cp=2)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        steps = recorded((), ranks[rank])
        for piece in steps.recorded[0].pieces:
            for x in piece.inputs:
                x.fill_(1.0)
        return steps.forward(batch, None), steps.recorded[0].shared.write_all  # type: ignore[arg-type]

    for got, write_all in on_ranks(2, work):
        assert torch.equal(got, Layer(1).attend(batch, ones, ones))
        by_rank = write_all.view(2, TOKENS)
        assert sorted(by_rank[:, :13].flatten().tolist())[1:] == sorted(batch.write_T.tolist())
        assert not by_rank[:, 13:].any(), "padding is written into the null page"


def test_pieces_that_leave_attention_to_another_are_not_gone_with() -> None:
    steps = recorded((4,))
    batch = step([5], [(0, 9)])
    assert fitting(steps.decoding, batch, TOKENS, (Layer(0).attend,)) is None
    assert fitting(steps.decoding, batch, 3, steps.recorded[0].attends) is None, "fewer tokens than rows"


def test_a_step_without_its_first_group() -> None:
    batch = step([5, 70], [(0, 4), (64, 3)])
    rest = without_first_group(batch)
    assert rest.groups == (Group(0, 1, 0, 4, 4), Group(1, 1, 4, 3, 67))
    assert rest.extents == batch.extents[2:] and torch.equal(rest.table_RP, batch.table_RP[2:])
    assert torch.equal(rest.positions_T, batch.positions_T[2:]) and torch.equal(rest.write_T, batch.write_T[2:])


def test_each_number_of_rows_is_at_most_half_of_the_one_before() -> None:
    assert halving([1, 2, 4, *range(8, 257, 8)]) == [256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert halving([1, 4, 16]) == [16, 4, 1] and halving([]) == []
