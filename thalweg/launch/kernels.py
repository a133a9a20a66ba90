"""Which kernel backends a model runs on: chosen from the catalogs of `config.backends`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from thalweg.config import backends
from thalweg.config.backends import FP8_CHIPS, SPARSE_DIMS, TRITON, AttentionCapabilities, KernelBackend
from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.config.options import (
    DSA_BACKENDS,
    LOGITS_BACKENDS,
    TOPK_BACKENDS,
    LoadOptions,
    Options,
    ParallelOptions,
)
from thalweg.core.capabilities import LACKS, Capabilities, Required, Selected, select
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import (
    DECISION_NAMES,
    FLASHMLA_HEADS,
    LATENT_TILE,
    RECORD,
    RECORD_TILE,
    TORCH,
    TORCH_ATTENTION,
    KernelConfig,
)
from thalweg.launch.decisions import Decisions
from thalweg.quant.catalog import quantized, scheme_of_experts

C = TypeVar("C", bound=Capabilities)

KV_NAMES = {"fp8": "fp8_e4m3"}  # other names of KV cache types
FLAG, REFERENCE, SPARSE = "attention_backend", "reference", "triton_sparse"
SPARSE_KERNELS = frozenset(name for name, row in backends.DECODE.items() if row.sparse)
FLASHMLA = {False: "flashmla_sparse", True: "flashmla_kv"}  # by whether latents are FP8 records
FLASHMLA_DIMS, FLASHMLA_TILE = (512, 64), 128  # of latents; of a choice
LOGITS_HEADS, LOGITS_DIMS = (32, 64), (32, 64, 128)  # of DeepGEMM: index heads, and their dims
LOGITS_NAMES = {"deepgemm": "deep_gemm"}  # other names of what computes index scores
HOT_WHOLE_CONTEXTS = "it cannot be combined with --dcp-size or --attn-cp-size; leave one of them out"
HIDDEN_TILE, WIDTH_TILE = 128, 64  # of an expert, for `kernels.experts.ext`
# attention backends by the values of --dsa-*-backend; flashmla_auto is the one that reads the KV cache
SPARSE_BACKENDS = {"triton": SPARSE, "torch": TORCH} | {name: name for name in FLASHMLA.values()}


class Wish(NamedTuple):
    """An attention backend that the user named."""

    flag: str
    value: str
    backend: str


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
    dims = _sparse_dims(facts) if _runs_sparse_kernels(options, machine, device, dtype) else ()
    wishes = _attention_wishes(load, facts, kv in ("fp8_e4m3", RECORD), dims in SPARSE_DIMS)
    if facts.indexer is not None and load.mla:
        kv = _sparse_cache_type(wishes, dims, kv)
    if kv == RECORD:
        _check_records(facts, load.mla)
    required = _requirements(options, facts, machine, device, kv or dtype, dtype, has_trees, decisions)
    decode, prefill = _attention(wishes, required, machine, facts.heads, dims)
    asked = load.attention_backend
    decisions.record(FLAG, asked or "auto", asked is not None, "the fastest that fits")
    topk, fp8_index = _resolve_index(load, facts, decode.name, kv, decisions)
    selected = {"decode": decode, "prefill": prefill}
    selected |= resolve_gemms(options, facts, machine, device, decode.name)
    selected |= _resolve_index_scores(options, facts, machine, required, decode.name, fp8_index, decisions)
    for role, backend in selected.items():
        decisions.add(DECISION_NAMES[role], backend.name, backend.source, backend.reason)
    chosen = {role: backend.name for role, backend in selected.items()}
    fusion = _shared_fusion(load.shared_experts_fusion, facts, decode.name == REFERENCE, decisions)
    other = KernelConfig(
        kv=kv, latent=load.mla, deterministic=is_deterministic, fusion=fusion, topk=topk, fp8_index=fp8_index
    )
    return msgspec.structs.replace(other, **chosen)


def _requirements(
    options: Options,
    facts: ModelFacts,
    machine: Machine,
    device: str,
    kv: str,
    dtype: str,
    has_trees: bool,
    decisions: Decisions,
) -> Required:
    """What attention needs. kv, dtype: of the KV cache and of activations. has_trees: drafts form a tree."""
    is_deterministic, parallel = options.load.deterministic_inference, options.parallel
    ranks = decisions.config().attention_tp
    mla = facts.mla if options.load.mla else None
    in_host = options.memory.enable_hisparse and facts.indexer is not None and mla is not None
    return {
        "device": device,
        "chip": machine.chip if device == "cuda" else "",
        "heads": "gqa" if facts.mla is None else "mha" if mla is None else "mla",
        "sparse": facts.indexer is not None,
        "kv": kv,
        "dtype": dtype,
        "deterministic": is_deterministic,
        "trees": has_trees,
        "unaligned_latents": is_deterministic and mla is not None and mla.kv_lora % LATENT_TILE > 0,
        "other_shapes": not _fits_flashmla(facts, ranks),
        "padded_heads": facts.heads // ranks not in FLASHMLA_HEADS,
        "divided": parallel.dcp_size > 1,
        "host_latents": in_host and not is_deterministic,
        "installed": True,
    }


def _attention_wishes(
    load: LoadOptions, facts: ModelFacts, is_fp8: bool, has_kernels: bool
) -> tuple[Wish | None, Wish | None]:
    """Backends that the user named for decode and prefill; None: the fastest that fits. is_fp8: the KV cache.
    has_kernels: sparse kernels are the default for this model; where they are not, or where torch is named, a role
    that no flag names has the other one's backend. Raises UnsupportedConfig.
    """
    every = None if load.attention_backend is None else Wish(FLAG, load.attention_backend, load.attention_backend)
    own = dict[str, Wish]()
    for role, known in (
        ("prefill", DSA_BACKENDS),
        ("decode", DSA_BACKENDS),
        ("topk", TOPK_BACKENDS),
        ("paged_mqa_logits", LOGITS_BACKENDS),
    ):
        flag = f"dsa_{role}_backend"
        value = getattr(load, flag)
        if value in (None, "auto"):
            continue
        if facts.indexer is None:
            raise UnsupportedConfig(f"{flag}: {facts.architecture} has no sparse attention; leave it out")
        if value not in known:
            there = ", ".join(("auto", *known))
            raise UnsupportedConfig(f"{flag}: {value} is no backend of sparse attention here; there is {there}")
        value = FLASHMLA[is_fp8] if value == "flashmla_auto" else value
        if role in ("prefill", "decode"):
            own[role] = Wish(flag, value, SPARSE_BACKENDS[value])
    if not own:
        return every, every
    named = [*own.values()][-1]
    other = None if has_kernels and named.backend != TORCH else named
    decode, prefill = (own.get(role) or every or other for role in ("decode", "prefill"))
    if decode is None or prefill is None:
        return decode, prefill
    if decode.backend != prefill.backend and not {decode.backend, prefill.backend} <= SPARSE_KERNELS:
        wishes = sorted((prefill, decode), key=lambda wish: wish.flag == FLAG)
        named_flags = " and ".join(f"--{wish.flag.replace('_', '-')} {wish.value}" for wish in wishes)
        raise UnsupportedConfig(
            f"{wishes[0].flag}: prompts and decode rows may have different kernels, but torch must compute both, not"
            f" {named_flags}; use triton, flashmla_sparse or flashmla_kv for both, or one backend"
        )
    if every is not None and every.backend not in (decode.backend, prefill.backend):
        raise UnsupportedConfig(
            f"{FLAG}: {every.value} has no part beside --{decode.flag.replace('_', '-')} and"
            f" --{prefill.flag.replace('_', '-')}; leave it out"
        )
    return decode, prefill


def _check_sparse_cache(wishes: Iterable[Wish | None], kv: str) -> None:
    """FlashMLA's kernels read one type of latents each. Raises UnsupportedConfig."""
    for wish in wishes:
        if wish is not None and wish.backend == FLASHMLA[True] and kv != RECORD:
            raise UnsupportedConfig(
                f"{wish.flag}: {wish.value} reads FP8 records; add --kv-cache-dtype {RECORD}, or use {FLASHMLA[False]}"
            )
        if wish is not None and wish.backend == FLASHMLA[False] and kv == RECORD:
            raise UnsupportedConfig(
                f"{wish.flag}: {wish.value} reads latents in bfloat16; use {FLASHMLA[True]}, which reads records, or"
                " leave --kv-cache-dtype out"
            )


def _sparse_cache_type(wishes: tuple[Wish | None, Wish | None], dims: tuple[int, ...], kv: str) -> str:
    """Kernels read FP8 latents as records alone. dims: of `_sparse_dims`, which choose kernels where nothing is wished
    for. Raises UnsupportedConfig.
    """
    is_kernel = any(wish is not None and wish.backend in SPARSE_KERNELS for wish in wishes)
    if kv == "fp8_e4m3" and (is_kernel or (wishes == (None, None) and dims in SPARSE_DIMS)):
        kv = RECORD
    _check_sparse_cache(wishes, kv)
    return kv


def _resolve_index(
    load: LoadOptions, facts: ModelFacts, decode: str, kv: str, decisions: Decisions
) -> tuple[str, bool]:
    """What chooses by an indexer's scores, and whether its keys are e4m3. Raises UnsupportedConfig."""
    if facts.indexer is None:
        return "triton", False
    own, asked = "triton" if decode in SPARSE_KERNELS else TORCH, load.dsa_topk_backend
    asked = None if asked in ("auto", "sgl-kernel") else asked
    if asked == "triton" and own == TORCH:
        raise UnsupportedConfig(f"dsa_topk_backend: triton does not choose beside {decode} attention; use torch")
    topk = decisions.choose("dsa_topk_backend", asked, own, "that which computes the scores")
    is_fp8 = any(scheme.operation == "fp8_gemm" for scheme in quantized(facts.quantization_config))
    fp8_index = kv == RECORD or (decode in SPARSE_KERNELS and not kv and is_fp8)
    reason = "as the cache is, or as the code of a checkpoint in FP8 has them, where kernels multiply them so"
    decisions.record("fp8_index_keys", fp8_index, False, reason)
    return topk, fp8_index


def _resolve_index_scores(
    options: Options,
    facts: ModelFacts,
    machine: Machine,
    attention: Required,
    decode: str,
    fp8_index: bool,
    decisions: Decisions,
) -> dict[str, Selected]:
    """What computes an indexer's scores, as a field of `KernelConfig`. attention: what its backends need to support.
    Raises UnsupportedConfig.
    """
    asked = options.load.dsa_paged_mqa_logits_backend
    if facts.indexer is None:
        return {}
    required = {name: attention[name] for name in ("chip", "deterministic", "installed")} | {
        "divided": attention["divided"] or options.parallel.shard_indexer,
        "attention": "torch" if decode in TORCH_ATTENTION else "kernels",
        "index_keys": "e4m3" if fp8_index else "plain",
        "other_index_heads": not _fits_deep_gemm(facts),
    }
    catalog, wish = _on(backends.INDEX_SCORES, machine, 0, _sparse_dims(facts)), asked or "auto"
    selected = select(DECISION_NAMES["index_scores"], required, catalog, LOGITS_NAMES.get(wish, wish))
    return {"index_scores": selected}


def _fits_deep_gemm(facts: ModelFacts) -> bool:
    """Whether it scores by these index heads."""
    index = facts.indexer
    return index is not None and index.heads in LOGITS_HEADS and index.dim in LOGITS_DIMS


def _fits_flashmla(facts: ModelFacts, ranks: int) -> bool:
    """Whether its sparse kernels take the heads of each of so many devices, the latents and the choice."""
    mla, indexer = facts.mla, facts.indexer
    return (
        mla is not None
        and indexer is not None
        and facts.heads // ranks <= max(FLASHMLA_HEADS)
        and (mla.kv_lora, mla.rope) == FLASHMLA_DIMS
        and indexer.topk % FLASHMLA_TILE == 0
    )


def unsupported_layout(
    kernels: KernelConfig, named: Collection[str], facts: ModelFacts, ranks: int, cp: int = 1, dcp: int = 1
) -> str:
    """Why the backends that the user named do not attend with the heads of each of so many devices; "" where they do.
    named: their fields in `kernels`. cp, dcp: devices that divide the tokens of a context, and the context.
    """
    if kernels.hot and (cp > 1 or dcp > 1):
        return f"enable_hisparse: {HOT_WHOLE_CONTEXTS}"
    for role, backend, row in (
        ("decode", kernels.decode, backends.DECODE[kernels.decode]),
        ("prefill", kernels.prefill, backends.PREFILL[kernels.prefill]),
    ):
        if role not in named:
            continue
        instead = f"use --dsa-{role}-backend triton"
        if True not in row.supports.other_shapes and not _fits_flashmla(facts, ranks):
            return f"attention backend {backend}: {LACKS['other_shapes']}; {instead}"
        if dcp > 1 and True not in row.supports.divided:
            return f"attention backend {backend}: {LACKS['divided']}; {instead}"
    scores = backends.INDEX_SCORES[kernels.index_scores]
    if "index_scores" in named and dcp > 1 and True not in scores.supports.divided:
        return f"{DECISION_NAMES['index_scores']} {kernels.index_scores}: {LACKS['divided']}; use triton"
    return ""


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


def _sparse_dims(facts: ModelFacts) -> tuple[int, ...]:
    """Dims of latents, of their rotated keys and of index keys; () without sparse attention."""
    mla, indexer = facts.mla, facts.indexer
    return () if mla is None or indexer is None else (mla.kv_lora, mla.rope, indexer.dim)


def _runs_sparse_kernels(options: Options, machine: Machine, device: str, dtype: str) -> bool:
    """Whether Triton's sparse kernels are chosen automatically. They need e4m3, which Ampere has not, and in
    deterministic mode whole contexts.
    """
    has_kernels = device == "cuda" and TRITON.name in machine.libraries and machine.chip in FP8_CHIPS
    has_parts = options.load.deterministic_inference and options.parallel.dcp_size > 1
    return has_kernels and options.load.mla and dtype == "bfloat16" and not has_parts


def _on(
    catalog: Mapping[str, KernelBackend[C]], machine: Machine, heads: int = 0, dims: tuple[int, ...] = ()
) -> dict[str, C]:
    """The capabilities on this machine, in order of preference for a model with so many heads and these
    `_sparse_dims`.
    """

    def is_preferred(row: KernelBackend[C]) -> bool:
        return 0 < row.preferred_heads <= heads or dims in row.preferred_dims

    names = sorted(catalog, key=lambda name: not is_preferred(catalog[name]))
    return {name: catalog[name].on(machine.libraries) for name in names}


def _attention(
    wishes: tuple[Wish | None, Wish | None], required: Required, machine: Machine, heads: int, dims: tuple[int, ...]
) -> tuple[Selected, Selected]:
    """The backends of decode and prefill. A named backend does what it can of the two, and the rest is chosen. The
    reference does both: it has its own layers.
    """
    catalogs = _on(backends.DECODE, machine, heads, dims), _on(backends.PREFILL, machine, 0, dims)
    known, pairs = list(dict.fromkeys((*catalogs[0], *catalogs[1]))), list(zip(wishes, catalogs, strict=True))
    for wish in wishes:
        if wish is not None and wish.backend not in known:
            raise UnsupportedConfig(f"{FLAG}: unknown backend {wish.value!r}; there is {', '.join(known)}")
    offered = [wish is not None and wish.backend in catalog for wish, catalog in pairs]
    serving = [
        wish is not None and wish.backend in catalog and required["heads"] in catalog[wish.backend].heads
        for wish, catalog in pairs
    ]
    # a backend that serves neither is passed on, for `select` to say why
    meant = serving if any(serving) else offered
    decode, prefill = (
        _select(wish if is_meant else None, required, catalog)
        for is_meant, (wish, catalog) in zip(meant, pairs, strict=True)
    )
    for chosen, wish, role in ((decode, wishes[0], "decode"), (prefill, wishes[1], "prefill")):
        if chosen.name == REFERENCE and wish is not None and wish.backend != REFERENCE:
            raise UnsupportedConfig(
                f"{wish.flag} {wish.value}: no kernel that fits computes {role} beside it. Use {REFERENCE}."
            )
        if chosen.name == REFERENCE:
            return chosen, chosen
    return decode, prefill


def _select(wish: Wish | None, required: Required, catalog: Mapping[str, AttentionCapabilities]) -> Selected:
    if wish is None:
        return select(FLAG, required, catalog, "auto")
    required = {**required, "padded_heads": False}
    if wish.flag == FLAG:
        return select(FLAG, required, catalog, wish.backend)
    values = {value: catalog[name] for value, name in SPARSE_BACKENDS.items()}
    return dataclasses.replace(select(wish.flag, required, values, wish.value), name=wish.backend)
