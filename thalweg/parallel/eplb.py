"""The expert load balancer of DeepSeek (github.com/deepseek-ai/EPLB): which experts get copies, and on which GPU each
copy is, from how many tokens each expert had. It gives the published maps, ties included.

Loads are float32, as there, so that rounding breaks ties alike. Letters: L layers, E experts, S slots for them, G GPUs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Loads = NDArray[np.float32]


class BalancedExperts(NamedTuple):
    """Slots in order of the GPUs, equally many on each."""

    expert_LS: Tensor  # int64: the expert of each slot
    slots_LEC: Tensor  # int64: the slots of each expert, then -1
    count_LE: Tensor  # int64: how many these are


def balance(load_LE: Tensor, slots: int, groups: int, nodes: int, gpus: int) -> BalancedExperts:
    """load_LE: tokens of each expert. groups: of experts, of which a token chooses some. Where nodes divide groups, an
    expert's copies stay on one node, and groups too.

    `slots` is a multiple of `gpus`, `gpus` of `nodes`.
    """
    load_LE = load_LE.float().cpu()
    if groups % nodes:
        groups = nodes = 1
    # torch's own sum: its order of additions shows in ties
    group_load_LG = load_LE.view(len(load_LE), groups, -1).sum(-1).numpy()
    layers = [
        _balance_layer(load_E, group_load_G, slots, nodes, gpus)
        for load_E, group_load_G in zip(load_LE.numpy(), group_load_LG, strict=True)
    ]
    expert_LS, copy_LS = (torch.tensor([layer[i] for layer in layers]) for i in range(2))
    count_LE = torch.stack([torch.bincount(expert_S, minlength=load_LE.shape[1]) for expert_S in expert_LS])
    slots_LEC = torch.full((*count_LE.shape, int(count_LE.max())), -1)
    layer_LS = torch.arange(len(layers)).unsqueeze(1).expand_as(expert_LS)
    slots_LEC[layer_LS, expert_LS, copy_LS] = torch.arange(slots).expand_as(expert_LS)
    return BalancedExperts(expert_LS, slots_LEC, count_LE)


def _balance_layer(
    load_E: Loads, group_load_G: Loads, slots: int, nodes: int, gpus: int
) -> tuple[list[int], list[int]]:
    """The expert of each slot, and which of its copies that is."""
    size, experts, copies = len(load_E) // len(group_load_G), list[int](), list[int]()
    for of_node in _pack(group_load_G, nodes):
        members = [group * size + i for group in of_node for i in range(size)]
        number, copy, count = _replicate(load_E[members], slots // nodes)
        for of_gpu in _pack((load_E[members] / count)[number], gpus // nodes):
            experts += [members[number[slot]] for slot in of_gpu]
            copies += [copy[slot] for slot in of_gpu]
    return experts, copies


def _pack(load_N: Loads, bins: int) -> list[list[int]]:
    """The items of each bin, equally many: the largest first, each into the open bin with the least load."""
    each = len(load_N) // bins
    if each == 1:
        return [[item] for item in range(bins)]
    packed: list[list[int]] = [[] for _ in range(bins)]
    open_bins = [(np.float32(0), number) for number in range(bins)]
    # not a stable sort: which of equal loads comes first is torch's choice there, and so here
    for item in torch.from_numpy(load_N).sort(descending=True).indices.tolist():
        load, number = heapq.heappop(open_bins)
        packed[number].append(item)
        if len(packed[number]) < each:
            heapq.heappush(open_bins, (load + load_N[item], number))
    return packed


def _replicate(load_E: Loads, slots: int) -> tuple[list[int], list[int], Loads]:
    """The expert of each slot, which of its copies that is, and the copies of each expert: one each, then one more for
    the expert with the most load a copy.
    """
    experts, copies = list(range(len(load_E))), [0] * len(load_E)
    count_E = np.ones(len(load_E), np.float32)
    for _ in range(slots - len(load_E)):
        most = int((load_E / count_E).argmax())
        experts.append(most)
        copies.append(int(count_E[most]))
        count_E[most] += 1
    return experts, copies, count_E


def utilization(load_E: Sequence[float], experts_S: Sequence[int], gpus: int) -> float:
    """Mean load of the GPUs over the largest, 1 where they are equal. experts_S: the expert of each slot; an expert's
    copies share its load.
    """
    slots = np.asarray(experts_S)
    share_E = np.asarray(load_E, np.float64) / np.maximum(np.bincount(slots, minlength=len(load_E)), 1)
    load_G = share_E[slots].reshape(gpus, -1).sum(1)
    return float(load_G.mean() / load_G.max()) if load_G.max() else 1.0
