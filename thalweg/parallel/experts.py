"""Which rank computes which expert, and where a token's experts are.

A slot holds the weights of one expert on one rank. A table says in which slots an expert is; copies of it share its
tokens. A token chooses among them by the experts that it goes to, so what it gets does not depend on the batch that it
is in. The table is on the device, at a fixed address: captured steps follow when experts move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thalweg.kernels.launch import implementation
from thalweg.parallel.axis import share_of
from thalweg.parallel.dispatch import dispatcher
from thalweg.parallel.layout import Layout

Compute = Callable[..., Tensor]


class ExpertPlacement:
    """The experts of one layer. Logical experts `experts` ... `experts + shared - 1` are the shared ones, which have a
    slot on every rank behind the routed ones and never move.
    """

    def __init__(
        self, experts: int, shared: int, layout: Layout, device: torch.device, layer: int, deterministic: bool = False
    ) -> None:
        self.layout, self.experts, self.layer = layout, experts, layer
        self.by_slot = expert_of_slots(experts, layout, layer)  # the routed expert of each slot, rank by rank
        ranks, own = layout.ep.size, layout.ep.rank
        self.slots = len(self.by_slot) // ranks  # of routed experts on this rank
        self.stride = self.slots + shared  # slots of a rank
        self.dispatcher, is_moving = dispatcher(layout), layout.experts.is_moving
        self._kernels = implementation("expert_slots", device)
        self.is_deterministic = deterministic
        # A sum over ranks groups a token's experts by rank: its bits change when one moves, and are not one rank's. The
        # latter can be where tokens are divided and nothing else is.
        is_whole = layout.cp.size > 1 and layout.tp.size == layout.moe_tp.size == 1
        self.sends_pairs = deterministic and (is_moving or is_whole)
        copies = max(layout.experts.redundant + 1, ranks if shared else 1)
        self.slot_EC = torch.zeros(experts + shared, copies, dtype=torch.int64, device=device)
        self.count_E = torch.ones(experts + shared, dtype=torch.int64, device=device)
        # whether tokens stay, and each expert has the slot of its number
        self.has_all_experts = layout.dp.size == ranks == 1 and not is_moving and self.by_slot == list(range(experts))
        # tokens that chose each routed expert since the last reset; the last number counts all else
        self.load_E = torch.zeros(experts + 1 if is_moving else 0, dtype=torch.int64, device=device)
        for number in range(shared):
            slots = [rank * self.stride + self.slots + number for rank in range(ranks)]
            self._write(experts + number, [slots[own : own + 1] if self.dispatcher.is_local else slots])
        self.place(self.by_slot)

    @property
    def here(self) -> list[int]:
        """The routed expert of each slot of this rank."""
        first = self.layout.ep.rank * self.slots
        return self.by_slot[first : first + self.slots]

    def place(self, by_slot: Sequence[int]) -> None:
        """Changes the table; weights are moved before."""
        slots: list[list[int]] = [[] for _ in range(self.experts)]
        for slot, expert in enumerate(by_slot):
            rank, place = divmod(slot, self.slots)
            slots[expert].append(rank * self.stride + place)
        self.by_slot = list(by_slot)
        self._write(0, slots)

    def _write(self, first: int, slots: Sequence[Sequence[int]]) -> None:
        device, copies = self.slot_EC.device, self.slot_EC.shape[1]
        if device.type == "meta":
            return
        some = slice(first, first + len(slots))
        rows = torch.tensor([[*of_expert, *[0] * (copies - len(of_expert))] for of_expert in slots])
        self.slot_EC[some].copy_(rows)
        self.count_E[some].copy_(torch.tensor([len(of_expert) for of_expert in slots]))

    def compute(self, ids_TK: Tensor, weights_TK: Tensor, rows: Sequence[Tensor], compute: Compute) -> Tensor:
        """Σ_k weights · expert(x) → [T, H], still to be summed over tensor-parallel ranks.

        ids: logical experts; one beyond them is none. rows: tensors [T, ...] that go with the tokens. compute(ids [N,
        K], weights, *rows): the sum over the slots of this rank, [N, H]; an id of `stride` is none.
        """
        if self.has_all_experts:
            return compute(ids_TK, weights_TK, *rows)
        return self._dispatched(self.choose(ids_TK), weights_TK, rows, compute)

    def pairs(self, ids_TK: Tensor, rows: Sequence[Tensor], compute: Compute) -> Tensor:
        """As `compute`, but float32 [T, K, H]: expert(x) of each choice, not to be summed any more."""
        slot_P1 = self.choose(ids_TK).view(-1, 1)
        rows_P = [x.repeat_interleave(ids_TK.shape[1], 0) for x in rows]
        weights_P1 = torch.ones(slot_P1.shape, device=slot_P1.device)
        pair_PH = self._dispatched(slot_P1, weights_P1, rows_P, compute)
        return self.layout.tp.all_reduce(pair_PH).view(*ids_TK.shape, -1)

    def choose(self, ids_TK: Tensor) -> Tensor:
        """`expert_slots.choose`, and counts the choices where experts move."""
        load_E = self.load_E if len(self.load_E) else None
        slot_TK: Tensor = self._kernels.choose(ids_TK, self.slot_EC, self.count_E, load_E)
        return slot_TK

    def _dispatched(self, slot_TK: Tensor, weights_TK: Tensor, rows: Sequence[Tensor], compute: Compute) -> Tensor:
        slot_NK, received, combine = self.dispatcher.dispatch(slot_TK, self.stride, weights_TK, rows)
        return combine(
            compute(self._kernels.local_slots(slot_NK, self.layout.ep.rank * self.stride, self.stride), *received)
        )


def expert_of_slots(experts: int, layout: Layout, layer: int) -> list[int]:
    """The routed expert of each slot of a layer, in order of the ranks. Raises UnsupportedConfig if ranks cannot have
    equally many.
    """
    slots = experts + layout.experts.redundant
    share_of(slots, layout.ep, "experts")
    if layer < len(layout.experts.by_slot):
        return list(layout.experts.by_slot[layer])
    return [slot % experts for slot in range(slots)]
