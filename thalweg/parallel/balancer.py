"""Moves experts between ranks while requests run, so that all ranks have as many tokens.

Every rank counts the tokens of each expert. After so many steps all add their counts and compute the same new places.
Then a few experts move before each step, until all are there. After each step every expert is somewhere, and the table
says where, so no request's tokens change. All ranks run the same steps, and so do the same moves before the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thalweg.parallel.axis import Axis, gather_number
from thalweg.parallel.eplb import balance, utilization
from thalweg.parallel.experts import ExpertPlacement
from thalweg.parallel.layout import Layout

MOVES = 4  # experts a rank that move before a step: 22 to 44 MB each of DeepSeek-V3, 0.1 ms over NVLink


class ExpertLayer(Protocol):
    """The experts of one layer on one rank."""

    placement: ExpertPlacement | None

    def slot_tensors(self, slot: int) -> list[Tensor]:
        """What a slot of this rank holds."""

    def place(self, by_slot: Sequence[int]) -> None:
        """Experts have moved: from now on the router finds them there."""


@dataclass(frozen=True, slots=True)
class BalancePolicy:
    interval: int  # steps between two looks at the counts
    layers: int = 0  # whose experts move before one step; 0: MOVES experts a rank, of one layer
    threshold: float = 1.0  # nothing moves above this utilization, the mean load of a rank over the largest
    groups: int = 1  # of experts, which are kept on one node; 1: each expert on its own
    nodes: int = 1  # that the ranks are on


class ExpertBalancer:
    """Of one model, on one rank."""

    def __init__(
        self, layers: Sequence[ExpertLayer], layout: Layout, policy: BalancePolicy, device: torch.device
    ) -> None:
        """layers: of this pipeline stage."""
        self.layers, self.layout, self.policy, self.device = list(layers), layout, policy, device
        self.placements = [_placement(layer) for layer in layers]
        numbers = 1 + max((placement.layer for placement in self.placements), default=-1)
        self.numbers = int(max(gather_number(layout.pipe.hidden, numbers, device)))  # of layers of all stages
        self.moves_elsewhere = 0  # of other stages, until the last look
        self._clear()  # warm-up steps have counted
        self.steps = self.moves = self.rebalances = 0
        self.imbalance: tuple[float, ...] = ()  # of each layer: the largest load of a rank over the mean
        self._loads: list[list[int]] = []
        self._targets: dict[int, list[int]] = {}  # by layer, of those that are not done
        self._left: list[int] = []  # layers whose experts may move

    def before_step(self) -> None:
        """Called by all ranks before each step."""
        self.steps += 1
        if self.steps % self.policy.interval == 0 and not self._is_any_moving():
            self._decide()
        elif self._left:
            self._move()

    def _is_any_moving(self) -> bool:
        """Whether experts of some pipeline stage are not yet where they belong."""
        return any(gather_number(self.layout.pipe.hidden, len(self._left), self.device))

    def loads(self) -> Tensor:
        """int64 [L, E] on the host: tokens of each expert since the counts were cleared. All ranks call it together."""
        if not self.placements:  # a pipeline stage of dense layers
            return torch.zeros(0, 0, dtype=torch.int64)
        own_LE = torch.stack([placement.load_E[:-1] for placement in self.placements])
        return self.layout.dp.all_gather(own_LE).sum(0).cpu()

    def stats(self) -> dict[str, Any]:
        """Fields of `core.messages.Stats`."""
        return {
            "expert_imbalance": self.imbalance,
            "expert_moves": self.moves + self.moves_elsewhere,
            "expert_rebalances": self.rebalances,
        }

    def record(self, layers: int, experts: int) -> dict[str, Any]:
        """What `--init-expert-location` reads, of a model of so many layers with so many experts. All ranks call it
        together.
        """
        in_order = [slot % experts for slot in range(experts + self.layout.experts.redundant)]
        known_LX = torch.zeros(layers, len(in_order) + experts, dtype=torch.int64)
        for placement, loads in zip(self.placements, self.loads().tolist(), strict=True):
            if placement.layer < layers:  # else it is a NextN layer's
                known_LX[placement.layer] = torch.tensor([*placement.by_slot, *loads])
        of_stages = self.layout.pipe.hidden.all_gather(known_LX.to(self.device)).cpu()
        slots_LS, loads_LE = torch.split(of_stages.sum(0), [len(in_order), experts], 1)
        return {
            "physical_to_logical_map": [slots if any(slots) else in_order for slots in slots_LS.tolist()],
            "logical_count": loads_LE.tolist(),
        }

    def _clear(self) -> None:
        for placement in self.placements:
            placement.load_E.zero_()

    def _decide(self) -> None:
        self._loads = self.loads().tolist()
        self._clear()
        used = [
            utilization(load, placement.by_slot, self.layout.ep.size)
            for load, placement in zip(self._loads, self.placements, strict=True)
        ]
        if any(map(any, self._loads)) and sum(used) <= self.policy.threshold * len(used):
            self._left = list(range(len(self.layers)))
        self.rebalances += self._is_any_moving()
        self._tell_stages(used)

    def _tell_stages(self, used: Sequence[float]) -> None:
        """All stages know how uneven the layers of all are, and how many experts have moved."""
        own = torch.zeros(self.numbers + 1, dtype=torch.float64)
        own[-1] = self.moves
        for placement, one in zip(self.placements, used, strict=True):
            own[placement.layer] = 1 / one
        *by_layer, moves = self.layout.pipe.hidden.all_gather(own.to(self.device)).sum(0).tolist()
        self.imbalance, self.moves_elsewhere = tuple(one for one in by_layer if one), int(moves) - self.moves

    def _move(self) -> None:
        for _ in range(self.policy.layers or 1):
            if not self._left:
                return
            number = self._left[0]
            is_done = self._move_layer(number)
            while self.policy.layers and not is_done:
                is_done = self._move_layer(number)
            if is_done:
                del self._targets[number], self._left[0]

    def _move_layer(self, number: int) -> bool:
        """Moves some experts of a layer. Returns whether all are where they belong."""
        layer, placement, ranks = self.layers[number], self.placements[number], self.layout.ep.size
        if number not in self._targets:
            load_1E, slots = torch.tensor([self._loads[number]]), len(placement.by_slot)
            new = balance(load_1E, slots, self.policy.groups, self.policy.nodes, ranks).expert_LS[0].tolist()
            self._targets[number] = aligned(placement.by_slot, new, ranks)
        moves, by_slot = next_moves(placement.by_slot, self._targets[number], MOVES * ranks)
        if moves:
            transfer(layer, moves, placement.slots, self.layout.ep)
            layer.place(by_slot)
            self.moves += len(moves)
        return by_slot == self._targets[number]


def _placement(layer: ExpertLayer) -> ExpertPlacement:
    assert layer.placement is not None, "experts move between ranks"
    return layer.placement


def aligned(current: Sequence[int], target: Sequence[int], ranks: int) -> list[int]:
    """The target with the experts of each rank in another order: those that are there already keep their slots."""
    each, found = len(current) // ranks, list[int]()
    for first in range(0, len(current), each):
        here, left = current[first : first + each], Counter(target[first : first + each])
        kept: list[int | None] = []
        for expert in here:
            kept.append(expert if left[expert] > 0 else None)
            left[expert] -= 1
        others = left.elements()
        found += [next(others) if expert is None else expert for expert in kept]
    return found


Move = tuple[int, int]  # from a slot to another


def next_moves(current: Sequence[int], target: Sequence[int], most: int) -> tuple[list[Move], list[int]]:
    """About `most` moves towards a target, and the expert of each slot after them. All are read before any is written.

    A copy goes where an expert is that has another copy; where there is none, two experts change places. So every
    expert is somewhere at any time.
    """
    now, moves, copies = list(current), list[Move](), Counter(current)
    left = {slot: None for slot in range(len(now)) if now[slot] != target[slot]}  # not written, wrong; in order
    source_of = {expert: slot for slot, expert in enumerate(now)}  # a slot that is not written

    def write(source: int, slot: int) -> None:
        moves.append((source, slot))
        del left[slot]
        copies[now[slot]] -= 1
        copies[current[source]] += 1
        now[slot] = current[source]
        if source_of[current[slot]] == slot:
            others = (i for i in range(len(now)) if now[i] == current[i] == current[slot])
            source_of[current[slot]] = next(others, -1)

    is_done = False
    while not is_done:  # copies; one may leave room for another
        is_done = True
        for slot in [slot for slot in left if copies[now[slot]] > 1]:
            if len(moves) < most and copies[now[slot]] > 1 and source_of[target[slot]] >= 0:
                write(source_of[target[slot]], slot)
                is_done = False
    for slot in list(left):
        if slot in left and len(moves) < most:
            other = next((i for i in left if target[i] == now[slot]), None)
            if other is not None:
                write(slot, other)
                write(other, slot)
    return moves, now


def transfer(layer: ExpertLayer, moves: Sequence[Move], slots: int, axis: Axis) -> None:
    """Copies what slots hold to other slots, on all ranks together. slots: of a rank."""
    sends, receives = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
    arrived: list[tuple[int, list[Tensor]]] = []
    for source, slot in moves:
        (sender, of_sender), (receiver, of_receiver) = divmod(source, slots), divmod(slot, slots)
        if axis.rank not in (sender, receiver):
            continue
        if sender == receiver:
            arrived.append((of_receiver, [tensor.clone() for tensor in layer.slot_tensors(of_sender)]))
        elif axis.rank == sender:
            sends += ((receiver, tensor) for tensor in layer.slot_tensors(of_sender))
        else:
            arrived.append((of_receiver, [torch.empty_like(tensor) for tensor in layer.slot_tensors(of_receiver)]))
            receives += ((sender, tensor) for tensor in arrived[-1][1])
    axis.transfer(sends, receives)
    for slot, tensors in arrived:
        for held, tensor in zip(layer.slot_tensors(slot), tensors, strict=True):
            held.copy_(tensor)
