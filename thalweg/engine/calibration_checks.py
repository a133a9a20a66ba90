"""The self-check of a start: each library that the configuration names computes a small case on this GPU before a model
relies on it.

That a library is installed says little: its binary may be built for another torch, CUDA or GPU. One that the user did
not ask for is replaced by our own kernels, with a warning and a word in the report; one that was asked for ends the
start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from thalweg.config.engine import EngineConfig
from thalweg.config.model import ModelFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import DECISION_NAMES, KernelConfig
from thalweg.core.report import START_UP, Decision
from thalweg.models.catalog import read_facts
from thalweg.quant.catalog import quantized

log = logging.getLogger("thalweg.engine")

OWN = "triton"  # what takes the place of a library


class Probe(NamedTuple):
    """role: the field of `KernelConfig` that names the backend. check: raises RuntimeError that says what is wrong."""

    role: str
    backend: str
    check: Callable[[], None]


def proven(config: EngineConfig) -> EngineConfig:
    """The configuration with every library that fails its check replaced. Raises UnsupportedConfig for one that was
    asked for, CheckpointError for a folder without a model."""
    if config.device != "cuda" or config.decode_attention_backend == "reference":
        return config
    facts = read_facts(Path(config.model_path))
    return settled(config, probes(config.kernels, facts, torch.device(config.device)))


def probes(kernels: KernelConfig, facts: ModelFacts, device: torch.device) -> list[Probe]:
    """What there is to check of this choice."""
    made: list[Probe] = []
    if facts.mla is not None and kernels.latent:
        from thalweg.kernels.mla import ext as mla  # asks for torch with CUDA

        if "flashmla" in kernels.decode:
            made.append(
                Probe("decode", kernels.decode, lambda: mla.check(device, facts.heads, kernels.kv == "fp8_e4m3"))
            )
        if kernels.prefill == "fa3":
            made.append(Probe("prefill", "fa3", lambda: mla.check_prefill(device)))
    if facts.mla is None:
        from thalweg.kernels.gqa import ext as fa3
        from thalweg.kernels.gqa import flashinfer

        shape = facts.heads, facts.kv_heads, facts.head_dim
        if kernels.prefill == "fa3":
            made.append(Probe("prefill", "fa3", lambda: fa3.check(device, *shape, facts.head_dim)))
        for role, backend in (("decode", kernels.decode), ("prefill", kernels.prefill)):
            if backend == "flashinfer":
                made.append(Probe(role, backend, lambda: flashinfer.check(device, *shape)))
    elif kernels.decode == "flashinfer":
        from thalweg.kernels.mla import flashinfer as latent

        made.append(Probe("decode", "flashinfer", lambda: latent.check(device, facts.heads)))
    codes = quantized(facts.quantization_config) is not None
    if facts.moe is not None and "deep_gemm" in kernels.moe:
        from thalweg.kernels.experts import ext as experts

        made.append(Probe("moe", kernels.moe, lambda: experts.check(device, codes)))
    if codes and kernels.fp8_gemm not in (OWN, "reference"):
        from thalweg.kernels.gemm import fp8

        made.append(Probe("fp8_gemm", kernels.fp8_gemm, lambda: fp8.check(device, kernels.fp8_gemm)))
    return made


def settled(config: EngineConfig, probes: Iterable[Probe]) -> EngineConfig:
    """See `proven`."""
    for role, backend, check in probes:
        name = DECISION_NAMES[role]
        try:
            check()
        except RuntimeError as error:
            if config.report.is_users(name):
                raise UnsupportedConfig(f"{name}: {error}") from error
            log.warning("%s: %s is not used, %s takes its place: %s", name, backend, OWN, error)
            failed = Decision(name, OWN, START_UP, f"{backend} failed its self-check: {error}")
            config = config.started([failed], **{name: OWN})
    return config
