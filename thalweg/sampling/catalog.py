"""Chooses the sampler of a device and of an acceptance rule."""

from __future__ import annotations

import torch

from thalweg.kernels.launch import supports_triton
from thalweg.sampling.draft_sampling import CoupledDraftSampling, DraftSampling, IndependentDraftSampling
from thalweg.sampling.rejection import RejectionSampling
from thalweg.sampling.relaxed import RelaxedAcceptance
from thalweg.sampling.sample import REFERENCE, Sampler


def sampler_on(device: torch.device) -> Sampler:
    """Kernels on a GPU, where Triton is installed; else plain torch."""
    if not supports_triton(device):
        return REFERENCE
    from thalweg.sampling.kernel_sampling import KernelSampler  # needs Triton

    return KernelSampler()


def with_acceptance_rule(sampler: Sampler, rule: str, candidates: int, delta: float) -> Sampler:
    """The sampler with this acceptance rule; "gumbel-max" is the sampler itself. candidates, delta: see
    `relaxed.RelaxedAcceptance`.
    """
    if rule == "rejection-sampling":
        return RejectionSampling(sampler)
    return RelaxedAcceptance(sampler, candidates, delta) if rule == "relaxed" else sampler


def draft_sampling_for(rule: str, width: int, vocab: int, device: torch.device) -> DraftSampling:
    """How drafts are sampled for this acceptance rule."""
    sampler = sampler_on(device)
    return (
        IndependentDraftSampling(width, vocab, sampler.distribution)
        if rule == "rejection-sampling"
        else CoupledDraftSampling(sampler)
    )
