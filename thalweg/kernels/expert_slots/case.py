"""Cases of the slots of experts: with and without copies, and with choices of none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from thalweg.kernels.case import KernelCase, size, with_triton
from thalweg.kernels.expert_slots import ref

EXPERTS, RANKS = 20, 4


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for tokens, choices, copies, counts in ((1, 8, 1, False), (5, 3, 3, True), (300, 9, 4, True), (70, 4, 1, True)):
        draw, device = partial(torch.randint, generator=generator, device=generator.device), generator.device
        ids_TK = draw(0, EXPERTS + 2, (tokens, choices), dtype=torch.int32)
        slot_EC, count_E = draw(0, 2 * EXPERTS, (EXPERTS, copies)), draw(1, copies + 1, (EXPERTS,))
        load_E = torch.zeros(EXPERTS - 1, dtype=torch.int64, device=device) if counts else None
        made = ref.choose(ids_TK, slot_EC, count_E)
        load = torch.bincount(ids_TK.flatten().clamp(max=EXPERTS - 2), minlength=EXPERTS - 1)
        yield KernelCase(
            name=f"{tokens} tokens, {choices} of {EXPERTS} experts in {copies} slots{', counted' * counts}",
            inputs={"ids_TK": ids_TK, "slot_EC": slot_EC, "count_E": count_E, "load_E": load_E},
            exact=(made.double(), ref.local_slots(made, 7, EXPERTS // RANKS).double(), load.double() * counts),
            tolerance=0.0,
            flops=ids_TK.numel(),
            bytes=3 * size(ids_TK),
        )


def _run(kernels: ModuleType, ids_TK: Tensor, slot_EC: Tensor, count_E: Tensor, load_E: Tensor | None) -> list[Tensor]:
    slot_TK = kernels.choose(ids_TK, slot_EC, count_E, load_E)
    load = torch.zeros(EXPERTS - 1, device=ids_TK.device) if load_E is None else load_E
    return [slot_TK, kernels.local_slots(slot_TK, 7, EXPERTS // RANKS), load]


def run(ids_TK: Tensor, slot_EC: Tensor, count_E: Tensor, load_E: Tensor | None) -> list[Tensor]:
    return _run(ref, ids_TK, slot_EC, count_E, load_E)


def run_triton(ids_TK: Tensor, slot_EC: Tensor, count_E: Tensor, load_E: Tensor | None) -> list[Tensor]:
    from thalweg.kernels.expert_slots import triton

    return _run(triton, ids_TK, slot_EC, count_E, load_E)


BACKENDS = with_triton(run, run_triton)
