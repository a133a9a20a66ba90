"""What accept is made of: by device, and by the rule that judges drafts."""

from __future__ import annotations

import torch

from thalweg.kernels.launch import supports_triton
from thalweg.sampling.drafts import Coupled, Drawing, Independent
from thalweg.sampling.relaxed import Relaxed
from thalweg.sampling.sample import REFERENCE, Sampling
from thalweg.sampling.standard import Standard


def sampling_on(device: torch.device) -> Sampling:
    """Kernels on a GPU, where Triton is installed; else plain torch."""
    if not supports_triton(device):
        return REFERENCE
    from thalweg.sampling.launched import Launched  # needs Triton

    return Launched()


def ruled(sampling: Sampling, rule: str, candidates: int, delta: float) -> Sampling:
    """The sampling, with drafts judged by this rule: "race" is its own. candidates, delta: see `relaxed.Relaxed`."""
    if rule == "standard":
        return Standard(sampling)
    return Relaxed(sampling, candidates, delta) if rule == "relaxed" else sampling


def drawing_for(rule: str, width: int, vocab: int, device: torch.device) -> Drawing:
    """How drafts are drawn that this rule judges."""
    sampling = sampling_on(device)
    return Independent(width, vocab, sampling.odds) if rule == "standard" else Coupled(sampling)
