"""The mesh: which processes form each axis."""

from __future__ import annotations

import pytest

from tests.cpu.ranks import layouts
from thalweg.core.errors import UnsupportedConfig
from thalweg.parallel.axis import SINGLE
from thalweg.parallel.layout import Layout
from thalweg.parallel.mesh import MeshSizes, axis_ranks, layout_of


class Named:
    """An axis that knows its processes."""

    def __init__(self, ranks: tuple[int, ...], own: int) -> None:
        self.ranks, self.size, self.rank = ranks, len(ranks), ranks.index(own)


def layout(sizes: MeshSizes, rank: int) -> Layout:
    return layout_of(sizes, rank, lambda name, ranks: Named(ranks, rank))  # type: ignore[arg-type,return-value]


def test_tensor_parallel_ranks_are_neighbours() -> None:
    assert axis_ranks(MeshSizes(tp=2, dp=2, ep=4), 3) == {
        "tp": (2, 3),
        "cp": (3,),
        "dp": (1, 3),
        "dcp": (3,),
        "ep": (0, 1, 2, 3),
        "moe_tp": (3,),
        "hidden": (3,),
        "published": (3,),
        "world": (0, 1, 2, 3),
    }
    assert axis_ranks(MeshSizes(tp=4, ep=2), 1)["ep"] == (1, 3)
    assert axis_ranks(MeshSizes(tp=4, ep=2), 1)["moe_tp"] == (0, 1)
    sizes = MeshSizes(tp=4, dp=2, pp=2, dcp=2)
    assert [axis_ranks(sizes, rank)["dcp"] for rank in (0, 3, 6, 9)] == [(0, 1), (2, 3), (6, 7), (8, 9)]


def test_ranks_that_divide_tokens_are_the_next_neighbours() -> None:
    axes = axis_ranks(MeshSizes(tp=2, dp=2, ep=8, cp=2, pp=2), 8 + 5)
    assert axes["tp"] == (12, 13) and axes["cp"] == (13, 15) and axes["dp"] == (9, 11, 13, 15)
    assert layout(MeshSizes(tp=2, dp=2, ep=8, cp=2), 5).scheduler == 1


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "cp"),
    [(2, 1, 1, 1), (4, 1, 4, 1), (2, 2, 2, 1), (1, 4, 4, 1), (2, 4, 2, 1), (1, 1, 2, 2), (2, 2, 4, 2)],
)
def test_each_process_of_an_axis_names_the_same_processes(tp: int, dp: int, ep: int, cp: int) -> None:
    sizes = MeshSizes(tp, dp, ep, tp, cp=cp, dcp=tp // 2 or 1)
    for rank in range(sizes.world):
        for name, ranks in axis_ranks(sizes, rank).items():
            assert all(axis_ranks(sizes, other)[name] == ranks for other in ranks) and rank in ranks


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "cp"), [(2, 1, 2, 1), (2, 2, 4, 1), (2, 2, 2, 1), (1, 2, 2, 1), (2, 2, 4, 2)]
)
def test_places_are_those_of_the_threaded_ranks(tp: int, dp: int, ep: int, cp: int) -> None:
    """The layouts of the model tests, whose ranks are threads."""
    for rank, threaded in enumerate(layouts(tp, dp, ep, cp=cp, dcp=tp)):
        own = layout(MeshSizes(tp, dp, ep, tp, cp=cp, dcp=tp), rank)
        for name in ("tp", "cp", "dp", "dense", "ep", "moe_tp", "dcp"):
            ours, theirs = getattr(own, name), getattr(threaded, name)
            assert (ours.size, ours.rank) == (theirs.size, theirs.rank), (rank, name)


def test_an_axis_of_one_process_computes_nothing() -> None:
    own = layout(MeshSizes(tp=2, dense=1), 0)
    assert own.dense is SINGLE and own.dp is SINGLE and not own.is_single
    assert layout(MeshSizes(), 0).is_single


def test_experts_are_divided_over_all_processes() -> None:
    with pytest.raises(UnsupportedConfig, match="experts are divided"):
        Layout(tp=Named((0, 1), 0))  # type: ignore[arg-type]
