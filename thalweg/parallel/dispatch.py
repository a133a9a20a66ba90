"""How tokens get to the ranks of their experts, and the experts' results back. All sizes are static: captured steps
replay them, and what a token's experts are stays on the device.

Letters: T tokens of this rank, N those that it receives, K experts of a token, R ranks of the expert axis, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thalweg.kernels.launch import implementation
from thalweg.parallel.layout import Layout


class Dispatched(NamedTuple):
    """Tokens that have come to this rank, and the way back of their results."""

    slot_NK: Tensor  # int32: the slots of their experts, on any rank; -1 is none
    rows: tuple[Tensor, ...]  # [N, ...], what came with them
    # [N, H], sums over the experts here → [T, H], still to be summed over tensor-parallel ranks
    combine: Callable[[Tensor], Tensor]


class TokenDispatcher(Protocol):
    """A way of dispatch. All ranks call it with equally many tokens."""

    is_local: bool  # a token's home rank computes its shared experts
    sends_codes: bool  # rows may be FP8 codes with their scales

    def dispatch(self, slot_TK: Tensor, stride: int, weights_TK: Tensor, rows: Sequence[Tensor]) -> Dispatched:
        """slot: int32, -1 is none. stride: slots of a rank. rows: tensors [T, ...] that go with the tokens, activations
        first. Received rows are (weights, *rows).
        """


class AllGatherDispatch:
    """Every rank gets the tokens of all data-parallel ranks and computes what its experts add to each."""

    is_local, sends_codes = False, True

    def __init__(self, layout: Layout) -> None:
        self.dp = layout.dp

    def dispatch(self, slot_TK: Tensor, stride: int, weights_TK: Tensor, rows: Sequence[Tensor]) -> Dispatched:
        dp, sent = self.dp, (slot_TK, weights_TK, *rows)
        if dp.size == 1:
            return Dispatched(slot_TK, sent[1:], lambda partial: partial)
        kernels = implementation("pack_rows", slot_TK.device)
        combine: Callable[[Tensor], Tensor] = dp.reduce_scatter
        bytes_NB = kernels.packed(sent)
        if dp.exchange is not None and dp.exchange.takes(*bytes_NB.shape):
            all_RNB, combine = dp.exchange.dispatch(bytes_NB, slot_TK.shape[1])
        else:
            all_RNB = dp.all_gather(bytes_NB)
        sent = kernels.unpacked(all_RNB.flatten(0, 1), sent)
        return Dispatched(sent[0], sent[1:], lambda partial: combine(partial.view(dp.size, -1, partial.shape[1])))


class AllToAllDispatch:
    """A token goes once to each rank that has one of its experts. Ranks with the same tokens share them, and those that
    share the width of an expert get each other's.

    The buffer of a pair of ranks has room for all tokens of one: the ones that are sent come first. Of few tokens
    nothing else is moved (`PeerExchange`), of many the whole buffers.
    """

    is_local = sends_codes = True

    def __init__(self, layout: Layout) -> None:
        self.own, self.ep, self.moe_tp = OwnTokens(layout), layout.ep, layout.moe_tp

    def dispatch(self, slot_TK: Tensor, stride: int, weights_TK: Tensor, rows: Sequence[Tensor]) -> Dispatched:
        ep, moe_tp, tokens = self.ep, self.moe_tp, len(slot_TK)
        sent = self.own.take(slot_TK, weights_TK, *rows)
        each, kernels = len(sent[0]), implementation("pack_rows", slot_TK.device)
        all_NB = moe_tp.all_gather(kernels.packed(sent)).flatten(0, 1)
        slot_NK = kernels.unpacked(all_NB, sent[:1])[0]
        rank_R11 = torch.arange(ep.size, device=slot_NK.device).view(-1, 1, 1)
        goes_RN = (slot_NK.div(stride, rounding_mode="floor") == rank_R11).any(-1)
        if ep.exchange is not None and ep.exchange.takes(*all_NB.shape):
            arrived_RNB, combine_rows = ep.exchange.dispatch(all_NB, slot_NK.shape[1], goes_RN)
        else:
            arrived_RNB, combine_rows = self._whole_buffers(all_NB, goes_RN)
        # the rest of a buffer are tokens without an expert on its rank
        received = kernels.unpacked(arrived_RNB.flatten(0, 1), sent)

        def combine(partial_NH: Tensor) -> Tensor:
            total_NH = combine_rows(partial_NH.view(ep.size, -1, partial_NH.shape[1]))
            return self.own.put(moe_tp.reduce_scatter(total_NH.view(moe_tp.size, each, -1)), tokens)

        return Dispatched(received[0], received[1:], combine)

    def _whole_buffers(self, all_NB: Tensor, goes_RN: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """As `PeerExchange.dispatch`; behind the rows that are sent lie the others, instead of nothing."""
        order_RN = (~goes_RN).to(torch.int32).argsort(dim=1, stable=True)

        def combine(partial_RNH: Tensor) -> Tensor:
            back_RNH, place_RN = self.ep.all_to_all(partial_RNH), order_RN.argsort(1)
            total_NH = partial_RNH.new_zeros(back_RNH.shape[1:], dtype=torch.float32)
            for goes_N, place_N, back_NH in zip(goes_RN, place_RN, back_RNH, strict=True):
                total_NH += back_NH[place_N].float().masked_fill(~goes_N.unsqueeze(1), 0.0)
            return total_NH

        return self.ep.all_to_all(all_NB[order_RN]), combine


class OwnTokens:
    """Tensor-parallel ranks have the same tokens: each sends every tp-th one."""

    def __init__(self, layout: Layout) -> None:
        self.tp = layout.tp

    def take(self, slot_TK: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """The rows of this rank's tokens, as many on each rank. The slots of those that fill up are -1."""
        tp, missing = self.tp, -len(slot_TK) % self.tp.size
        if missing:
            slot_TK = torch.cat((slot_TK, slot_TK.new_full((missing, slot_TK.shape[1]), -1)))
            rows = tuple(torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) for x in rows)
        return tuple(x[tp.rank :: tp.size].contiguous() for x in (slot_TK, *rows))

    def put(self, own_NH: Tensor, tokens: int) -> Tensor:
        """[tokens, H] with the rows of this rank's tokens, and zeros."""
        tp = self.tp
        all_TH = own_NH.new_zeros(len(own_NH) * tp.size, own_NH.shape[1])
        all_TH[tp.rank :: tp.size] = own_NH
        return all_TH[:tokens]


def dispatcher(layout: Layout) -> TokenDispatcher:
    """The way that the layout names. Raises UnsupportedConfig for a library that is not installed."""
    match layout.experts.backend:
        case "alltoall":
            return AllToAllDispatch(layout)
        case "deepep":
            from thalweg.parallel.deepep import DeepEPDispatch  # which needs this module

            return DeepEPDispatch(layout)
    return AllGatherDispatch(layout)
