"""Cases of a draw after top-k, top-p and min-p: one row of each kind, over few and many likely ids, equal ids, and ids
that a grammar forbids.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thalweg.kernels.build_inputs.ref import FLOATS, INTS, LENGTH, SEED, TOP_K, SlotTensors
from thalweg.kernels.case import KernelCase, normal, size, with_triton
from thalweg.kernels.temperature.ref import apply_temperature

OFF = 1 << 30  # as a top-k
# temperature, top-k, top-p, min-p; no top-p falls between two of so many equal ids, where rounding would decide
ROWS = (
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
    rows = len(ROWS)
    floats, ints = torch.zeros(rows, len(FLOATS)), torch.zeros(rows, len(INTS), dtype=torch.int64)
    floats[:, :3] = torch.tensor([(temperature, top_p, min_p) for temperature, _, top_p, min_p in ROWS])
    ints[:, TOP_K] = torch.tensor([top_k for _, top_k, *_ in ROWS])
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
        ints[:, SEED] = torch.randint(0, 1 << 62, (rows,), generator=generator)
        ints[:, LENGTH] = torch.randint(1, 4000, (rows,), generator=generator)
        inputs = {"logits_EV": logits, "ints_EI": ints.clone(), "floats_EF": floats}
        exact = (exact_logits(**inputs) + noise(ints, vocab)).argmax(-1)
        name = f"{name}: {rows} rows of {vocab}"
        yield KernelCase(name, inputs, (exact,), tolerance=0.0, flops=10 * rows * vocab, bytes=size(logits))


def exact_logits(logits_EV: Tensor, ints_EI: Tensor, floats_EF: Tensor) -> Tensor:
    """float64 [E, V], id by id, as the definition reads. Quotients are rounded to float32 before they are compared, so
    that the same ones are equal.
    """
    left_EV = torch.full(logits_EV.shape, -torch.inf, dtype=torch.float64)
    rows = zip(logits_EV, left_EV, ints_EI[:, TOP_K].tolist(), floats_EF.tolist(), strict=True)
    for logits, left, top_k, (temperature, top_p, min_p, *_) in rows:
        value = (logits.double() / temperature).float().double()
        order = sorted(range(len(value)), key=lambda v: (-float(value[v]), v))[:top_k]
        mass = (value[order] - value[order[0]]).exp().tolist()
        total, before = sum(mass), 0.0
        for v, share in zip(order, mass, strict=True):
            if v == order[0] or ((top_p >= 1 or before < top_p * total) and share >= min_p):
                left[v] = value[v]
            before += share
    return left_EV


def noise(ints_EI: Tensor, vocab: int) -> Tensor:
    """Gumbel noise, float64 [E, V]: minus the logarithms of Exp(1) variates, from SplitMix64's finaliser of (seed,
    position, id), its upper 32 bits in the middle of their steps.
    """
    golden, word, ids = 0x9E3779B97F4A7C15, 2**64, np.arange(vocab, dtype=np.uint64)

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))

    def row(seed: int, position: int) -> Tensor:
        first = int(mix(np.array([(seed * golden + position) % word], dtype=np.uint64))[0])
        key = mix(np.array([(first + golden) % word], dtype=np.uint64))
        bits = mix(key + ids * np.uint64(golden)) >> np.uint64(32)
        return torch.from_numpy(-np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32)))

    return torch.stack([row(seed, position) for seed, position in ints_EI[:, [SEED, LENGTH]].tolist()])


def run(logits_EV: Tensor, ints_EI: Tensor, floats_EF: Tensor) -> tuple[Tensor, ...]:
    left_EV = apply_temperature(logits_EV, floats_EF, ints_EI[:, TOP_K], True)
    return ((left_EV + noise(ints_EI, logits_EV.shape[1])).argmax(-1),)


def run_triton(logits_EV: Tensor, ints_EI: Tensor, floats_EF: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.sample.triton import SampledRows
    from thalweg.kernels.topk_topp import triton

    (rows, vocab), device = logits_EV.shape, logits_EV.device
    tokens = torch.full((rows, int(ints_EI[:, LENGTH].max()) + 2), -1, dtype=torch.int32, device=device)
    stops, slot_E = torch.full((rows, 1), -1, device=device), torch.arange(rows, device=device)
    slots = SlotTensors(stops, tokens, ints_EI.clone(), tokens, None)
    out = torch.full((rows,), -1, device=device), *torch.zeros(2, rows, dtype=torch.bool, device=device)
    triton.sample_tokens(SampledRows(logits_EV, vocab, vocab, slot_E, ints_EI, floats_EF), slots, out)
    return (out[0],)


BACKENDS = with_triton(run, run_triton)
