"""Experts divided over ranks: every way of dispatch, copies, and experts that move give one rank's sums. Ranks are
threads. Experts are plain matrices here; whole models are in test_sharded_models.py and tests/ranks.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.ranks import ThreadAxis, layouts, on_ranks
from thalweg.core.errors import UnsupportedConfig
from thalweg.kernels.exchange import ref as exchange
from thalweg.kernels.pack_rows.ref import packed, unpacked
from thalweg.parallel import balancer as balancing
from thalweg.parallel import deepep, dispatch
from thalweg.parallel.balancer import BalancePolicy, ExpertBalancer
from thalweg.parallel.experts import ExpertPlacement
from thalweg.parallel.layout import SINGLE_RANK, ExpertLayout, Layout

EXPERTS, SHARED, HIDDEN, TOPK = 8, 1, 16, 3
CPU = torch.device("cpu")
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2-ep2": {"tp": 2, "ep": 2},
    "dp2-ep2": {"dp": 2, "ep": 2},
    "tp2-dp2-ep4": {"tp": 2, "dp": 2, "ep": 4},
    "tp2-dp2-ep2": {"tp": 2, "dp": 2, "ep": 2},
}
MATRICES = torch.randn(EXPERTS + SHARED, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0))


@dataclass
class Stack:
    """The experts of a rank: matrices, of whose input this rank multiplies some columns."""

    placement: ExpertPlacement

    def __post_init__(self) -> None:
        moe_tp = self.placement.layout.moe_tp
        self.columns = slice(moe_tp.rank * HIDDEN // moe_tp.size, (moe_tp.rank + 1) * HIDDEN // moe_tp.size)
        shared = [EXPERTS] * (self.placement.stride - self.placement.slots)
        self.held = MATRICES[[*self.placement.here, *shared]].clone()

    def slot_tensors(self, slot: int) -> list[Tensor]:
        return [self.held[slot], self.held[slot, 0]]

    def place(self, by_slot: Sequence[int]) -> None:
        self.placement.place(by_slot)

    def compute(self, ids_NK: Tensor, weights_NK: Tensor, x_NH: Tensor) -> Tensor:
        x_NH = torch.zeros_like(x_NH).index_copy_(1, torch.arange(HIDDEN)[self.columns], x_NH[:, self.columns])
        total_NH = torch.full_like(x_NH, torch.nan)
        for row, (ids, weights) in enumerate(zip(ids_NK.tolist(), weights_NK, strict=True)):
            here = [(k, one) for k, one in enumerate(ids) if one < len(self.held)]
            if here or row % 2:  # rows without experts may hold anything
                total_NH[row] = sum((weights[k] * (self.held[one] @ x_NH[row]) for k, one in here), torch.zeros(HIDDEN))
        return (
            total_NH.nan_to_num(7.0)
            if isinstance(self.placement.dispatcher, dispatch.AllToAllDispatch)
            else (total_NH.nan_to_num(0.0))
        )


def inputs(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids with the shared expert, weights. Low experts are chosen more often; the last token is padding."""
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(tokens, HIDDEN, generator=generator)
    odds = torch.rand(tokens, EXPERTS, generator=generator) / torch.arange(1, EXPERTS + 1)
    ids_TK = torch.cat((odds.topk(TOPK).indices, torch.full((tokens, SHARED), EXPERTS)), 1)
    ids_TK[-1] = EXPERTS + SHARED
    return x_TH, ids_TK, torch.rand(tokens, TOPK + SHARED, generator=generator)


def exact(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    matrices = torch.cat((MATRICES, torch.zeros(1, HIDDEN, HIDDEN)))[ids_TK]
    return torch.einsum("tk,tkhi,ti->th", weights_TK, matrices, x_TH)


def ranks_of(name: str, experts: ExpertLayout) -> list[Layout]:
    return [replace(layout, experts=experts) for layout in layouts(**LAYOUTS[name])]


def placed(layout: Layout, deterministic: bool = False, layer: int = 0) -> Stack:
    return Stack(ExpertPlacement(EXPERTS, SHARED, layout, CPU, layer, deterministic))


def total(stack: Stack, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    if stack.placement.sends_pairs:
        return torch.einsum("tk,tkh->th", weights_TK, stack.placement.pairs(ids_TK, [x_TH], stack.compute))
    return stack.placement.layout.tp.all_reduce(stack.placement.compute(ids_TK, weights_TK, [x_TH], stack.compute))


class ThreadPeers:
    """`PeerExchange` of ranks that are threads, by the reference of its kernels."""

    def __init__(self, axis: ThreadAxis) -> None:
        self.axis, self.calls = axis, 0

    def takes(self, rows: int, row_bytes: int) -> bool:
        return rows > 1 and row_bytes % 4 == 0

    def dispatch(self, bytes_NB: Tensor, marked: int, goes_RN: Tensor | None = None) -> Any:
        self.calls += 1
        rank, size = self.axis.rank, self.axis.size
        goes_RN = torch.ones(size, len(bytes_NB), dtype=torch.bool) if goes_RN is None else goes_RN
        goes_RRN = self.axis.all_gather(goes_RN)
        rows_RNW = self.axis.all_gather(bytes_NB.view(torch.int32))

        def combine(results_RNH: Tensor) -> Tensor:
            return exchange.combine(self.axis.all_gather(results_RNH), goes_RRN)[rank]

        return exchange.dispatch(rows_RNW, goes_RRN, marked)[rank].view(torch.uint8), combine


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("redundant", [0, 4])
@pytest.mark.parametrize("backend", ["allgather", "alltoall", "allgather one-sided", "alltoall one-sided"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_dispatch_gives_one_ranks_sums(name: str, backend: str, redundant: int, deterministic: bool) -> None:
    by_slot = ((7, 0, 2, 1, 3, 6, 5, 4) + (0, 1, 0, 0)[:redundant],)
    backend, is_one_sided, _ = backend.partition(" one-sided")
    ranks = ranks_of(name, ExpertLayout(redundant, by_slot, deterministic, backend))
    axes = [layout.ep if backend == "alltoall" else layout.dp for layout in ranks]
    sides = [axis for axis in axes if is_one_sided and axis.size > 1]
    for axis in sides:
        object.__setattr__(axis, "exchange", ThreadPeers(axis))  # type: ignore[arg-type]
    for tokens in (1, 5, 12):
        own = [inputs(tokens, rank // ranks[0].tp.size) for rank in range(len(ranks))]
        got = on_ranks(len(ranks), lambda rank, own=own: total(placed(ranks[rank], deterministic), *own[rank]))
        for rank, sums_TH in enumerate(got):
            tolerance = 3e-2 if is_one_sided else 1e-4  # results are bf16 on their way back
            torch.testing.assert_close(sums_TH, exact(*own[rank]), rtol=tolerance, atol=tolerance)
            assert torch.equal(sums_TH, got[rank - ranks[rank].tp.rank]), "equal bits on all ranks"
    assert not sides or any(axis.exchange.calls for axis in sides)


def test_a_token_finds_the_same_copies_in_any_batch() -> None:
    (layout, _) = ranks_of("dp2-ep2", ExpertLayout(4, ((*range(64), 0, 0, 0, 1),)))
    placement = ExpertPlacement(64, 1, layout, CPU, 0)
    ids_TK = torch.rand(2000, 64, generator=torch.Generator().manual_seed(1)).topk(8).indices
    ids_TK = torch.cat((ids_TK, torch.full((2000, 1), 64)), 1)
    together = placement.choose(ids_TK)
    for token in (0, 7, 150):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(token))
        assert torch.equal(placement.choose(ids_TK[token : token + 1, order]), together[token : token + 1, order])
    for expert, copies in ((0, 4), (1, 2), (2, 1), (64, 2)):
        used = together[ids_TK == expert].bincount()
        assert int((used > 0).sum()) == copies
        assert used[used > 0].min() > 0.5 * used.max(), "and all alike"


def test_padding_is_not_counted() -> None:
    stack = placed(replace(SINGLE_RANK, experts=ExpertLayout(is_moving=True)))
    x_TH, ids_TK, weights_TK = inputs(9)
    stack.placement.compute(ids_TK, weights_TK, [x_TH], stack.compute)
    counts = ids_TK[:-1, :TOPK].flatten().bincount(minlength=EXPERTS)
    assert torch.equal(stack.placement.load_E[:EXPERTS], counts)


def moving(name: str, redundant: int, backend: str, policy: BalancePolicy, deterministic: bool = False) -> list[Any]:
    """Steps of all ranks while experts move: (sums, expert of each slot, moves) of each."""
    ranks = ranks_of(name, ExpertLayout(redundant, (), True, backend))

    def work(rank: int) -> list[Any]:
        layers = [placed(ranks[rank], deterministic, layer) for layer in range(2)]
        balancer, found = ExpertBalancer(layers, ranks[rank], policy, CPU), list[Any]()
        own = inputs(24, seed=rank // ranks[0].tp.size)
        for _ in range(16):
            balancer.before_step()
            sums = [total(layer, *own) for layer in layers]
            for layer in layers:
                here = layer.placement.here
                assert torch.equal(layer.held[: len(here)], MATRICES[here]), "weights are where the table says"
            found.append((sums, [layer.placement.by_slot for layer in layers], balancer.moves))
        assert balancer.rebalances >= 1 and len(balancer.imbalance) == 2
        record = balancer.record(3, EXPERTS)
        assert record["physical_to_logical_map"][:2] == [layer.placement.by_slot for layer in layers]
        return [*found, own, balancer.imbalance]

    return on_ranks(len(ranks), work)


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize(("name", "redundant"), [("tp2-dp2-ep4", 4), ("tp2-dp2-ep2", 0), ("dp2-ep2", 2)])
def test_sums_stay_while_experts_move(name: str, redundant: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancing, "MOVES", 1)
    got = moving(name, redundant, "alltoall" if layers == 1 else "none", BalancePolicy(2, layers))
    for *steps, own, _ in got:
        for sums, _, _ in steps:
            for sums_TH in sums:
                torch.testing.assert_close(sums_TH, exact(*own), rtol=1e-4, atol=1e-4)
    for step in zip(*(steps for *steps, _, _ in got), strict=True):
        assert len({str(by_slot) for _, by_slot, _ in step}) == 1, "all ranks know the same places"
    *steps, _, last = got[0]
    counts = [moves for *_, moves in steps]
    assert counts[0] == 0 and counts[-1] > 4
    ranks, most = LAYOUTS[name]["ep"], 2 if layers == 0 else 100
    assert all(later - earlier <= max(ranks, most) for earlier, later in zip(counts, counts[1:], strict=False))
    assert max(last) < 1.7, "low experts are chosen most, and were neighbours"


def test_deterministic_sums_keep_their_bits_while_experts_move() -> None:
    got = moving("tp2-dp2-ep4", 4, "none", BalancePolicy(2), deterministic=True)
    for *steps, _, _ in got:
        first, places, _ = steps[0]
        assert any(by_slot != places for _, by_slot, _ in steps)
        assert all(torch.equal(a, b) for sums, _, _ in steps for a, b in zip(sums, first, strict=True))
    loose = moving("tp2-dp2-ep4", 4, "none", BalancePolicy(2))
    assert any(
        not torch.equal(a, b)
        for *steps, _, _ in loose
        for sums, _, _ in steps
        for a, b in zip(sums, steps[0][0], strict=True)
    ), "else there was nothing to show"


def test_nothing_moves_above_the_threshold() -> None:
    ranks = ranks_of("dp2-ep2", ExpertLayout(is_moving=True))

    def work(rank: int) -> tuple[int, tuple[float, ...]]:
        layer = placed(ranks[rank])
        balancer = ExpertBalancer([layer], ranks[rank], BalancePolicy(1, threshold=0.1), CPU)
        for _ in range(4):
            total(layer, *inputs(24))
            balancer.before_step()
        return balancer.moves, balancer.imbalance

    for moves, imbalance in on_ranks(2, work):
        assert moves == 0 and imbalance[0] > 1.2


def test_rows_of_any_types_are_packed() -> None:
    rows = (torch.arange(6, dtype=torch.int32).view(3, 2), torch.randn(3, 5).bfloat16(), torch.randn(3, 1, 2))
    for some in (rows, tuple(x[:1] for x in rows), tuple(x[:0] for x in rows)):
        for got, want in zip(unpacked(packed(some), some), some, strict=True):
            assert got.shape == want.shape and torch.equal(got, want)


# ---- DeepEP, of which only a stand-in runs here


class Config:
    def get_nvl_buffer_size_hint(self, row: int, ranks: int) -> int:
        return row * ranks


class Buffer:
    """Does what DeepEP V1's documentation says, between threads: bf16 rows, int64 ids, -1 for none."""

    get_dispatch_config = get_combine_config = staticmethod(lambda ranks: Config())
    get_low_latency_rdma_size_hint = staticmethod(lambda few, hidden, ranks, experts: few * hidden * ranks)

    def __init__(self, group: Any, nvl: int, rdma: int, low_latency_mode: bool, num_qps_per_rank: int) -> None:
        self.group, self.low_latency_mode = group, low_latency_mode
        assert (nvl > 0) or low_latency_mode

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        each = num_experts // self.group.size
        in_rank = torch.stack([(topk_idx // each == rank).any(1) for rank in range(self.group.size)], 1)
        return in_rank.sum(0), None, torch.zeros(num_experts), in_rank, None

    def dispatch(
        self,
        x: Tensor,
        num_worst_tokens: int,
        topk_idx: Tensor,
        topk_weights: Tensor,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        **_: Any,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        each, rank = len(num_tokens_per_expert) // self.group.size, self.group.rank
        all_x, all_ids, all_weights, goes = (
            self.group.all_gather(one).flatten(0, 1) for one in (x, topk_idx, topk_weights, is_token_in_rank)
        )
        mine = goes[:, rank].nonzero().flatten()
        assert len(mine) <= num_worst_tokens == len(all_x)
        got_x, got_weights = x.new_full((num_worst_tokens, x.shape[1]), 3.0), all_weights.new_zeros(all_ids.shape)
        got_ids = all_ids.new_full(all_ids.shape, -1)
        got_x[: len(mine)], got_weights[: len(mine)] = all_x[mine], all_weights[mine]
        got_ids[: len(mine)] = torch.where(all_ids[mine] // each == rank, all_ids[mine] - rank * each, -1)
        return got_x, got_ids, got_weights, [], (mine, len(x)), None

    def combine(self, x: Tensor, handle: tuple[Tensor, int]) -> tuple[Any, ...]:
        mine, tokens = handle
        parts = x.new_zeros(self.group.size * tokens, x.shape[1])
        parts[mine] = x[: len(mine)]
        return self.group.reduce_scatter(parts.view(self.group.size, tokens, -1)).bfloat16(), None, None

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, most: int, num_experts: int, use_fp8: bool
    ) -> tuple[Any, ...]:
        assert self.low_latency_mode and not use_fp8 and len(x) <= most
        each, rank = num_experts // self.group.size, self.group.rank
        all_x, all_ids = (self.group.all_gather(one).flatten(0, 1) for one in (x, topk_idx))
        got, count = x.new_full((each, most * self.group.size, x.shape[1]), 3.0), torch.zeros(each, dtype=torch.int32)
        places = []
        for token, k in (all_ids // each == rank).nonzero().tolist():
            expert = int(all_ids[token, k]) - rank * each
            got[expert, count[expert]] = all_x[token]
            places.append((expert, int(count[expert]), token, k))
            count[expert] += 1
        return got, count, (places, len(x)), None, lambda: None

    def low_latency_combine(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any) -> tuple[Any, ...]:
        places, tokens = handle
        weights = self.group.all_gather(topk_weights).flatten(0, 1)
        parts = torch.zeros(self.group.size * tokens, x.shape[2])
        for expert, place, token, k in places:
            parts[token] += weights[token, k] * x[expert, place].float()
        return self.group.reduce_scatter(parts.view(self.group.size, tokens, -1)).bfloat16(), None, None


@dataclass(frozen=True, eq=False)
class GroupedAxis(ThreadAxis):
    __hash__ = object.__hash__

    @property
    def group(self) -> ThreadAxis:
        return self


@pytest.mark.parametrize("mode", ["normal", "low_latency", "auto"])
@pytest.mark.parametrize("name", ["tp2-ep2", "dp2-ep2", "tp2-dp2-ep4"])
def test_deepep_is_called_as_its_interface_says(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepep, "find_spec", lambda name: object())
    monkeypatch.setattr(deepep, "ProcessAxis", GroupedAxis)
    monkeypatch.setattr(deepep, "FEW", 5)
    monkeypatch.setitem(sys.modules, "deep_ep", types.SimpleNamespace(Buffer=Buffer))
    ranks = [
        replace(layout, ep=GroupedAxis(layout.ep.rendezvous, layout.ep.rank))  # type: ignore[attr-defined]
        for layout in ranks_of(name, ExpertLayout(4, (), False, "deepep", mode))
    ]

    def work(rank: int, tokens: int) -> Tensor:
        x_TH, ids_TK, weights_TK = inputs(tokens)
        placement = ExpertPlacement(EXPERTS, SHARED, ranks[rank], CPU, 0)
        stack = Stack(placement)

        def compute(ids_NK: Tensor, weights_NK: Tensor, x_NH: Tensor) -> Tensor:
            return stack.compute(ids_NK, weights_NK, x_NH.float()).bfloat16()

        return ranks[rank].tp.all_reduce(placement.compute(ids_TK, weights_TK, [x_TH.bfloat16()], compute))

    for tokens in (4, 5) if mode == "low_latency" else (4, 12):
        x_TH, ids_TK, weights_TK = inputs(tokens)
        want = exact(x_TH.bfloat16().float(), ids_TK, weights_TK)
        for got in on_ranks(len(ranks), lambda rank, tokens=tokens: work(rank, tokens)):
            assert float((got - want).norm() / want.norm()) < 0.01
    if mode == "low_latency" and name == "dp2-ep2":
        with pytest.raises(UnsupportedConfig, match="deepep_mode: low_latency sends 5 tokens"):
            on_ranks(len(ranks), lambda rank: work(rank, 6))


def test_deepep_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepep, "find_spec", lambda name: None)
    (layout, _) = ranks_of("dp2-ep2", ExpertLayout(backend="deepep"))
    with pytest.raises(UnsupportedConfig, match="deep_ep .* is not installed; use allgather or alltoall"):
        placed(layout)
