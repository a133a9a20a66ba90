"""Start-up self-check: each library that the configuration names computes a small case before a model relies on it.

An installed library may be built for another torch, CUDA or GPU. A failing one is replaced by our own kernels, with a
warning and a decision in the report. If the user asked for it by name, the start fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from thalweg.config.backends import DECODE, EXPERTS, FP8, INDEX_SCORES, PREFILL
from thalweg.config.engine import EngineConfig
from thalweg.config.entry_point import load_entry
from thalweg.config.model import ModelFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import DECISION_NAMES, CheckCase, KernelConfig
from thalweg.core.report import START_UP, Decision
from thalweg.kernels.gemm import toolchain
from thalweg.models.catalog import read_facts
from thalweg.quant.catalog import quantized, scheme_of_experts

log = logging.getLogger("thalweg.engine")

OWN, OWN_SPARSE = "triton", "triton_sparse"  # replace a library that fails


class SelfCheck(NamedTuple):
    """The check of one library."""

    role: str  # field of `KernelConfig` that names the backend
    backend: str
    run: Callable[[], None]  # raises RuntimeError that says what is wrong


def check_backends(config: EngineConfig) -> EngineConfig:
    """The configuration with every library that fails its check replaced.

    Raises UnsupportedConfig for one that the user asked for, CheckpointError for a folder without a model.
    """
    if config.device != "cuda" or config.decode_attention_backend == "reference":
        return config
    facts = read_facts(Path(config.model_path), config.index_topk_pattern)
    device = torch.device(config.device)
    config = replace_failing(config, self_checks(config.kernels, facts, device))
    is_used = any("deep_gemm" in check.backend for check in self_checks(config.kernels, facts, device))
    return with_compiler(config, toolchain.trials_here()) if is_used else config


def with_compiler(config: EngineConfig, trials: Sequence[toolchain.ProbeResult]) -> EngineConfig:
    """The configuration whose report says what compiles DeepGEMM's kernels, and why."""
    *failed, chosen = trials
    why = "the first that compiles a small source here"
    if failed:
        why += f"; failed: {'; '.join(map(str, failed))}"
    log.info("DeepGEMM's kernels are compiled by %s: %s", chosen, why)
    return config.started([Decision("deep_gemm_compiler", str(chosen), START_UP, why)])


def self_checks(kernels: KernelConfig, facts: ModelFacts, device: torch.device) -> list[SelfCheck]:
    """The self-checks of the libraries that this configuration uses, as the catalogs name them."""
    is_fp8 = any(scheme.operation == "fp8_gemm" for scheme in quantized(facts.quantization_config))
    of_experts = scheme_of_experts(facts.quantization_config, facts.layers)
    has_fp8_experts = of_experts is not None and of_experts.operation == "fp8_gemm"
    is_mla, uses_latents = facts.mla is not None, facts.mla is not None and kernels.latent
    decode, prefill = DECODE[kernels.decode], PREFILL[kernels.prefill]
    entries = {
        "decode": decode.check_mla if uses_latents else "" if is_mla else decode.check_gqa,
        "prefill": prefill.check_mla if uses_latents else "" if is_mla else prefill.check_gqa,
        "moe": "" if facts.moe is None else EXPERTS[kernels.moe].check,
        "fp8_gemm": FP8[kernels.fp8_gemm].check if is_fp8 else "",
        "index_scores": "" if facts.indexer is None else INDEX_SCORES[kernels.index_scores].check,
    }
    checks = []
    for role, entry in entries.items():
        if entry:
            backend: str = getattr(kernels, role)
            codes = has_fp8_experts if role == "moe" else is_fp8
            shape = facts.heads, facts.kv_heads, facts.head_dim, facts.head_dim
            if role == "index_scores" and facts.indexer is not None:
                shape = facts.indexer.heads, 1, facts.indexer.dim, facts.indexer.dim
            case = CheckCase(backend, *shape, kernels.kv == "fp8_e4m3", codes)
            checks.append(SelfCheck(role, backend, partial(load_entry(entry), device, case)))
    return checks


def replace_failing(config: EngineConfig, checks: Iterable[SelfCheck]) -> EngineConfig:
    """Runs the checks: see `check_backends`."""
    for role, backend, run in checks:
        name = DECISION_NAMES[role]
        try:
            run()
        except RuntimeError as error:
            if config.report.is_users(name):
                raise UnsupportedConfig(f"{name}: {error}") from error
            row = {"decode": DECODE, "prefill": PREFILL}.get(role, {}).get(backend)
            own = OWN_SPARSE if row is not None and row.sparse else OWN
            log.warning("%s: %s is not used, %s takes its place: %s", name, backend, own, error)
            failed = Decision(name, own, START_UP, f"{backend} failed its self-check: {error}")
            config = config.started([failed], **{name: own})
    return config
