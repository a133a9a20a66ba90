"""Cases of a tempered distribution and of who wins its race, with which score: the wishes and rows of `truncate`. Coins
that lose may be rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import KernelCase, Run, size
from thalweg.kernels.launch import triton_available
from thalweg.kernels.temperature import ref
from thalweg.kernels.topk_topp import case as topk_topp

NAMES = "temperature_E", "top_k_E", "top_p_E", "min_p_E", "seed_E", "position_E"


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for one in topk_topp.cases(generator):
        logits = one.inputs["logits_EV"]
        columns = (one.inputs[name].tolist() for name in NAMES)
        rows = [_exact(row, *asked) for row, *asked in zip(logits, *columns, strict=True)]
        exact = tuple(torch.stack(part) for part in zip(*rows, strict=True))
        yield replace(one, exact=exact, tolerance=1e-5, bytes=3 * size(logits))


def _exact(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> tuple[Tensor, ...]:
    value = (logits.double() / temperature).float().double()
    kept = topk_topp.kept(value, top_k, top_p, min_p)
    left = torch.full_like(value, -torch.inf)
    left[kept] = value[kept]
    return left, *(left - topk_topp.coins(seed, position, len(value)).log()).max(-1)


def won(left_EV: Tensor, raced_EV: Tensor) -> tuple[Tensor, ...]:
    """What is compared. Ids are below 10⁴ here: the tolerance takes none for another."""
    return left_EV, *raced_EV.max(-1)


def run(
    logits_EV: Tensor,
    temperature_E: Tensor,
    top_k_E: Tensor,
    top_p_E: Tensor,
    min_p_E: Tensor,
    seed_E: Tensor,
    position_E: Tensor,
) -> tuple[Tensor, ...]:
    floats_EF = torch.stack((temperature_E, top_p_E, min_p_E), 1)
    left_EV = ref.apply_temperature(logits_EV, floats_EF, top_k_E, True)
    return won(left_EV, left_EV - topk_topp.coins_of(seed_E, position_E, logits_EV.shape[1]).log())


def run_triton(
    logits_EV: Tensor,
    temperature_E: Tensor,
    top_k_E: Tensor,
    top_p_E: Tensor,
    min_p_E: Tensor,
    seed_E: Tensor,
    position_E: Tensor,
    device: str = "cuda",
) -> tuple[Tensor, ...]:
    from thalweg.kernels.temperature import triton
    from thalweg.kernels.topk_topp.triton import SamplingColumns

    floats = torch.stack((temperature_E, top_p_E, min_p_E), 1).to(device)
    ints = torch.stack((position_E, position_E - 1, position_E + 9, seed_E, top_k_E), 1).to(device)
    wishes = SamplingColumns(torch.arange(len(floats), device=device), floats, ints, 3, 4)
    left_EV = triton.apply_temperature(logits_EV.to(device), wishes, True)
    raced_EV = triton.add_gumbel_noise(left_EV, ints[:, 3], ints[:, 0])
    return won(left_EV.to(logits_EV.device), raced_EV.to(logits_EV.device))


BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if triton_available() else {})
