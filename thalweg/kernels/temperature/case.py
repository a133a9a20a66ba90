"""Cases of logits by temperature, top-k, top-p and min-p, and of the best id with its score after noise: the rows of
`topk_topp`. Noise of ids that are not the best may be rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from thalweg.kernels.build_inputs.ref import LENGTH, SEED, TOP_K
from thalweg.kernels.case import KernelCase, size, with_triton
from thalweg.kernels.temperature import ref
from thalweg.kernels.topk_topp import case as topk_topp


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for one in topk_topp.cases(generator):
        left, logits = topk_topp.exact_logits(**one.inputs), one.inputs["logits_EV"]
        exact = with_best(left, left + topk_topp.noise(one.inputs["ints_EI"], left.shape[1]))
        yield replace(one, exact=exact, tolerance=1e-5, bytes=3 * size(logits))


def with_best(left_EV: Tensor, noisy_EV: Tensor) -> tuple[Tensor, ...]:
    """The values to compare. Ids are below 10⁴ here: the tolerance takes none for another."""
    return left_EV, *noisy_EV.max(-1)


def run(logits_EV: Tensor, ints_EI: Tensor, floats_EF: Tensor) -> tuple[Tensor, ...]:
    left_EV = ref.apply_temperature(logits_EV, floats_EF, ints_EI[:, TOP_K], True)
    return with_best(left_EV, left_EV + topk_topp.noise(ints_EI, logits_EV.shape[1]))


def run_triton(logits_EV: Tensor, ints_EI: Tensor, floats_EF: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.sample.triton import SampledRows
    from thalweg.kernels.temperature import triton

    rows, vocab = logits_EV.shape
    sampled = SampledRows(logits_EV, vocab, vocab, torch.arange(rows, device=logits_EV.device), ints_EI, floats_EF)
    left_EV = triton.apply_temperature(sampled, True)
    return with_best(left_EV, triton.add_gumbel_noise(left_EV, ints_EI[:, SEED], ints_EI[:, LENGTH]))


BACKENDS = with_triton(run, run_triton)
