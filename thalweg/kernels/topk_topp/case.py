"""Cases of a truncated draw: one row of each kind of wish, over few and many likely ids, equal ids, and ids that a
grammar forbids.
"""

from __future__ import annotations

from typing import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thalweg.kernels.case import KernelCase, Run, normal, size
from thalweg.kernels.launch import triton_available
from thalweg.kernels.topk_topp import ref

OFF = 1 << 30  # as a top-k
# temperature, top-k, top-p, min-p; no top-p falls between two of so many equal ids, where rounding would decide
WISHES = (
    (1.0, 2, 1.0, 0.0),
    (0.7, 20, 0.81, 0.0),
    (1.3, OFF, 0.9013, 0.0),
    (1.0, OFF, 1.1e-3, 0.0),
    (1.0, OFF, 1.0, 0.1),
    (0.8, 50, 0.95, 0.05),
    (1.0, 900, 1.0, 0.0),
    (1.0, 3000, 0.9013, 0.0),
    (0.5, OFF, 1.0, 1.0),
)


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    rows = len(WISHES)
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*WISHES, strict=True))
    for name, vocab, scale in (
        ("many", 5000, 1.0),
        ("few", 9000, 4.0),
        ("small", 300, 2.0),
        ("equal", 5000, 0.0),
        ("forbidden", 5000, 1.0),
    ):
        logits = normal(generator, rows, vocab) * scale
        if name == "forbidden":
            logits[:, torch.randperm(vocab, generator=generator)[5:]] = -torch.inf
        seed = torch.randint(0, 1 << 62, (rows,), generator=generator)
        position = torch.randint(1, 4000, (rows,), generator=generator)
        given = temperature, top_k, top_p, min_p, seed, position
        names = "temperature_E", "top_k_E", "top_p_E", "min_p_E", "seed_E", "position_E"
        columns = (column.tolist() for column in given)
        exact = [_exact(row, *asked) for row, *asked in zip(logits, *columns, strict=True)]
        yield KernelCase(
            name=f"{name}: {rows} rows of {vocab}",
            inputs={"logits_EV": logits} | dict(zip(names, given, strict=True)),
            exact=(torch.tensor(exact),),
            tolerance=0.0,
            flops=10 * rows * vocab,
            bytes=size(logits),
        )


def coins(seed: int, position: int, vocab: int) -> Tensor:
    """Exp(1) variates, float64, of the token ids: SplitMix64's finaliser of (seed, position, id), its upper 32 bits in
    the middle of their steps.
    """
    golden, word = 0x9E3779B97F4A7C15, 2**64

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))

    first = int(mix(np.array([(seed * golden + position) % word], dtype=np.uint64))[0])
    key = mix(np.array([(first + golden) % word], dtype=np.uint64))
    bits = mix(key + np.arange(vocab, dtype=np.uint64) * np.uint64(golden)) >> np.uint64(32)
    return torch.from_numpy(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32))


def coins_of(seed_E: Tensor, position_E: Tensor, vocab: int) -> Tensor:
    """float32 [E, V]."""
    pairs = zip(seed_E.tolist(), position_E.tolist(), strict=True)
    return torch.stack([coins(seed, position, vocab).float() for seed, position in pairs])


def _exact(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> int:
    """Id by id, as the definition reads. Quotients are rounded to float32 before they are compared, so that the same
    ones are equal.
    """
    value = (logits.double() / temperature).float().double()
    ids = kept(value, top_k, top_p, min_p)
    race = value - coins(seed, position, len(value)).log()
    return max(ids, key=lambda v: float(race[v]))


def kept(value: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Ids, the most likely first."""
    order = sorted(range(len(value)), key=lambda v: (-float(value[v]), v))[:top_k]
    mass = (value[order] - value[order[0]]).exp().tolist()
    total, before = sum(mass), 0.0
    found: list[int] = []
    for v, share in zip(order, mass, strict=True):
        if not found or ((top_p >= 1 or before < top_p * total) and share >= min_p):
            found.append(v)
        before += share
    return found


def run(
    logits_EV: Tensor,
    temperature_E: Tensor,
    top_k_E: Tensor,
    top_p_E: Tensor,
    min_p_E: Tensor,
    seed_E: Tensor,
    position_E: Tensor,
) -> tuple[Tensor, ...]:
    left_EV = ref.apply_topk_topp(logits_EV / temperature_E[:, None], top_k_E, top_p_E, min_p_E)
    return ((left_EV - coins_of(seed_E, position_E, logits_EV.shape[1]).log()).argmax(-1),)


def run_triton(
    logits_EV: Tensor,
    temperature_E: Tensor,
    top_k_E: Tensor,
    top_p_E: Tensor,
    min_p_E: Tensor,
    seed_E: Tensor,
    position_E: Tensor,
) -> tuple[Tensor, ...]:
    from thalweg.kernels.topk_topp import triton

    rows, longest = len(logits_EV), int(position_E.max())
    floats = torch.stack((temperature_E, top_p_E, min_p_E), 1).cuda()
    ints = torch.stack((position_E, position_E - 1, position_E + 9, seed_E, top_k_E), 1).cuda()
    tokens = torch.full((rows, longest + 2), -1, dtype=torch.int32, device="cuda")
    out = torch.full((rows,), -1, device="cuda"), *torch.zeros(2, rows, dtype=torch.bool, device="cuda")
    wishes = triton.SamplingColumns(torch.arange(rows, device="cuda"), floats, ints, 3, 4)
    stops = torch.full((rows, 1), -1, device="cuda")
    triton.draw(logits_EV.cuda(), wishes, ints.clone(), stops, tokens, longest + 1, out)
    return (out[0].to(logits_EV.device),)


BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if triton_available() else {})
