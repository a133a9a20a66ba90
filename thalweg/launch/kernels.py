"""Which kernel backends a model runs on: chosen from the catalogs of `config.backends`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from thalweg.config import backends
from thalweg.config.backends import KernelBackend
from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.config.options import LoadOptions, Options, ParallelOptions
from thalweg.core.capabilities import Capabilities, Required, Selected, select
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import DECISION_NAMES, LATENT_TILE, RECORD, RECORD_TILE, TORCH, KernelConfig
from thalweg.launch.decisions import Decisions
from thalweg.quant.catalog import quantized, scheme_of_experts

C = TypeVar("C", bound=Capabilities)

KV_NAMES = {"fp8": "fp8_e4m3"}  # other names of KV cache types
FLAG, REFERENCE, SPARSE = "attention_backend", "reference", "triton_sparse"
HIDDEN_TILE, WIDTH_TILE = 128, 64  # of an expert, for `kernels.experts.ext`
DSA_BACKENDS = {"triton": SPARSE, "torch": TORCH}  # attention backends by the values of --dsa-*-backend


def resolve_kernels(
    options: Options, facts: ModelFacts, machine: Machine, device: str, decisions: Decisions, has_trees: bool = False
) -> KernelConfig:
    """has_trees: whether drafts form a tree. Raises UnsupportedConfig."""
    load = options.load
    asked_kv = options.memory.kv_cache_dtype or ""
    kv = KV_NAMES.get(asked_kv, asked_kv)
    dtype = load.dtype or ("bfloat16" if device == "cuda" else "float32")
    if facts.mla is not None:
        reason = "latents take a fraction of the memory of keys and values"
        decisions.record("mla", load.mla, not load.mla, reason)
    elif not load.mla:
        raise UnsupportedConfig("mla: off, but this model has no latent attention; leave --disable-mla out")
    reason = "kernels may round differently in another batch, and are faster"
    is_deterministic = load.deterministic_inference
    decisions.record("deterministic_inference", is_deterministic, is_deterministic, reason)
    wish = _attention_wish(load, facts)
    if kv == "fp8_e4m3" and wish == SPARSE and facts.indexer is not None and load.mla:
        kv = RECORD  # the only FP8 latents that its kernels read
    if kv == RECORD:
        _check_records(facts, load.mla)
    required = {
        "device": device,
        "chip": machine.chip if device == "cuda" else "",
        "heads": "gqa" if facts.mla is None else "mla" if load.mla else "mha",
        "sparse": facts.indexer is not None,
        "kv": kv or dtype,
        "dtype": dtype,
        "deterministic": is_deterministic,
        "trees": has_trees,
        "unaligned_latents": is_deterministic
        and load.mla
        and facts.mla is not None
        and facts.mla.kv_lora % LATENT_TILE > 0,
        "installed": True,
    }
    decode, prefill = _attention(wish, required, machine, facts.heads)
    asked = load.attention_backend
    decisions.record(FLAG, asked or "auto", asked is not None, "the fastest that fits")
    topk, fp8_index = _resolve_index(load, facts, decode.name, kv, decisions)
    selected = {"decode": decode, "prefill": prefill}
    selected |= resolve_gemms(options, facts, machine, device, decode.name)
    for role, backend in selected.items():
        decisions.add(DECISION_NAMES[role], backend.name, backend.source, backend.reason)
    chosen = {role: backend.name for role, backend in selected.items()}
    fusion = _shared_fusion(load.shared_experts_fusion, facts, decode.name == REFERENCE, decisions)
    other = KernelConfig(
        kv=kv, latent=load.mla, deterministic=is_deterministic, fusion=fusion, topk=topk, fp8_index=fp8_index
    )
    return msgspec.structs.replace(other, **chosen)


def _attention_wish(load: LoadOptions, facts: ModelFacts) -> str | None:
    """The attention backend that the user named, there or by --dsa-*-backend. Raises UnsupportedConfig."""
    flags = {f"dsa_{role}_backend": getattr(load, f"dsa_{role}_backend") for role in ("prefill", "decode", "topk")}
    asked = {flag: value for flag, value in flags.items() if value not in (None, "auto")}
    for flag, value in asked.items():
        if facts.indexer is None:
            raise UnsupportedConfig(f"{flag}: {facts.architecture} has no sparse attention; leave it out")
        if value not in DSA_BACKENDS:
            known = ", ".join(("auto", *DSA_BACKENDS))
            raise UnsupportedConfig(f"{flag}: {value} is no backend of sparse attention here; there is {known}")
    asked.pop("dsa_topk_backend", None)
    meant = {flag: DSA_BACKENDS[value] for flag, value in asked.items()}
    if load.attention_backend is not None:
        meant[FLAG] = load.attention_backend
    if len({*meant.values()}) > 1:
        told = " and ".join(f"--{flag.replace('_', '-')} {asked.get(flag, value)}" for flag, value in meant.items())
        raise UnsupportedConfig(f"{next(iter(asked))}: one backend computes all sparse attention, not {told}")
    return next(iter(meant.values()), None)


def _resolve_index(
    load: LoadOptions, facts: ModelFacts, decode: str, kv: str, decisions: Decisions
) -> tuple[str, bool]:
    """What chooses by an indexer's scores, and whether its keys are e4m3. Raises UnsupportedConfig."""
    if facts.indexer is None:
        return "triton", False
    own, asked = "triton" if decode == SPARSE else TORCH, load.dsa_topk_backend
    asked = None if asked == "auto" else asked
    if asked == "triton" and own == TORCH:
        raise UnsupportedConfig(f"dsa_topk_backend: triton does not choose beside {decode} attention; use torch")
    topk = decisions.choose("dsa_topk_backend", asked, own, "that which computes the scores")
    is_fp8 = any(scheme.operation == "fp8_gemm" for scheme in quantized(facts.quantization_config))
    fp8_index = kv == RECORD or (decode == SPARSE and not kv and is_fp8)
    reason = "as the cache is, or as the code of a checkpoint in FP8 has them, where kernels multiply them so"
    decisions.record("fp8_index_keys", fp8_index, False, reason)
    return topk, fp8_index


def _check_records(facts: ModelFacts, is_latent: bool) -> None:
    """Raises UnsupportedConfig."""
    mla = facts.mla if is_latent and facts.indexer is not None else None
    if mla is None or mla.kv_lora % min(mla.kv_lora, RECORD_TILE):
        raise UnsupportedConfig(
            f"kv_cache_dtype: {RECORD} is for models with sparse attention (DSA) to latents of whole tiles of"
            f" {RECORD_TILE} dims; use fp8_e4m3"
        )


def _shared_fusion(wish: bool | None, facts: ModelFacts, is_reference: bool, decisions: Decisions) -> bool | None:
    """Raises UnsupportedConfig for what cannot be enforced, whatever the checkpoint stores."""
    has_shared = facts.moe is not None and facts.moe.shared > 0
    if wish and (is_reference or not has_shared):
        why = "the plain kernels of --attention-backend reference have none" if has_shared else "no shared experts"
        raise UnsupportedConfig(f"shared_experts_fusion: {why}; leave --enforce-shared-experts-fusion out")
    if is_reference or not has_shared:
        return None
    decisions.choose("shared_experts_fusion", wish, True, "where a checkpoint stores both alike")
    return wish


def resolve_gemms(
    options: Options, facts: ModelFacts, machine: Machine, device: str, attention: str
) -> dict[str, Selected]:
    """Backends of experts and quantized products, by field of `KernelConfig`, as far as the model has them. A backend
    that the user named is checked in any case. attention: the decode backend. Raises UnsupportedConfig.
    """
    load, scheme = options.load, scheme_of_experts(facts.quantization_config, facts.layers)
    is_reference = attention == REFERENCE  # it decodes weights of every scheme
    required: dict[str, str | int | bool] = {
        "attention": REFERENCE if is_reference else "kernels",
        "chip": machine.chip if device == "cuda" else "",
        "deterministic": load.deterministic_inference,
        "installed": True,
    }
    is_fp8 = any(scheme.operation == "fp8_gemm" for scheme in quantized(facts.quantization_config))
    is_plain = scheme is None or is_reference or not scheme.has_expert_kernels
    of_experts = "plain" if scheme is None or is_plain else scheme.operation
    selected: dict[str, Selected] = {}
    is_unaligned = not is_reference and has_unaligned_experts(facts, options.parallel)
    for role, is_needed, weights, unaligned, asked, catalog in (
        ("moe", facts.moe is not None, of_experts, is_unaligned, load.moe_runner_backend, backends.EXPERTS),
        ("fp8_gemm", is_fp8, "fp8_gemm" if is_fp8 else "plain", False, load.fp8_gemm_backend, backends.FP8),
    ):
        if is_needed or asked is not None:
            supported, needed = _on(catalog, machine), {**required, "weights": weights, "unaligned_experts": unaligned}
            selected[role] = select(DECISION_NAMES[role], needed, supported, asked or "auto")
    return selected


def has_unaligned_experts(facts: ModelFacts, parallel: ParallelOptions) -> bool:
    """Whether the experts on some rank are matrices of no whole tiles. Ranks that share an expert get whole blocks of
    its width, see `parallel.axis.width_of`.
    """
    if facts.moe is None:
        return False
    width, ranks = facts.moe.intermediate, max(parallel.tp_size // parallel.ep_size, 1)
    return facts.hidden % HIDDEN_TILE > 0 or width % WIDTH_TILE > 0 or width // WIDTH_TILE < ranks


def _on(catalog: Mapping[str, KernelBackend[C]], machine: Machine, heads: int = 0) -> dict[str, C]:
    """The capabilities on this machine, in order of preference for a model with this many heads."""
    names = sorted(catalog, key=lambda name: not 0 < catalog[name].preferred_heads <= heads)
    return {name: catalog[name].on(machine.libraries) for name in names}


def _attention(asked: str | None, required: Required, machine: Machine, heads: int) -> tuple[Selected, Selected]:
    """The backends of decode and prefill. A named backend does what it can of the two, and the rest is chosen. The
    reference does both: it has its own layers.
    """
    catalogs = _on(backends.DECODE, machine, heads), _on(backends.PREFILL, machine)
    known = list(dict.fromkeys((*catalogs[0], *catalogs[1])))
    if asked is not None and asked not in known:
        raise UnsupportedConfig(f"{FLAG}: unknown backend {asked!r}; there is {', '.join(known)}")
    wishes = ["auto", "auto"]
    if asked is not None:
        serving = [asked in catalog and required["heads"] in catalog[asked].heads for catalog in catalogs]
        # a backend that serves neither is passed on, for `select` to say why
        meant = serving if any(serving) else [asked in catalog for catalog in catalogs]
        wishes = [asked if is_meant else "auto" for is_meant in meant]
    decode, prefill = (select(FLAG, required, *of) for of in zip(catalogs, wishes, strict=True))
    for chosen, role in ((decode, "decode"), (prefill, "prefill")):
        if chosen.name == REFERENCE and asked not in (None, REFERENCE):
            raise UnsupportedConfig(f"{FLAG} {asked}: no kernel that fits computes {role} beside it. Use {REFERENCE}.")
        if chosen.name == REFERENCE:
            return chosen, chosen
    return decode, prefill
