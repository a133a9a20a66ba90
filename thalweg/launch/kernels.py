"""Which kernels a model runs on: the part of the resolver's decisions that goes by catalogs of backends."""

from __future__ import annotations

from collections.abc import Mapping

from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.config.options import Options
from thalweg.core.capabilities import Selected, select
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import DECISION_NAMES, KernelConfig
from thalweg.core.report import USER
from thalweg.launch.backends import AttentionCaps, AttentionNeed, attention_need, decode_catalog, prefill_catalog
from thalweg.launch.decisions import Decisions, source_and_reason
from thalweg.launch.products import resolve_products

KV_NAMES = {"fp8": "fp8_e4m3"}  # what others call them
WISH = "attention_backend"


def resolve_kernels(
    config: Options, facts: ModelFacts, machine: Machine, device: str, decisions: Decisions, trees: bool = False
) -> KernelConfig:
    """Decides and notes it. trees: whether drafts may part ways. Raises UnsupportedConfig."""
    load = config.load
    kv = _kv(config)
    latent, deterministic = load.mla, load.deterministic_inference
    if facts.mla is not None:
        decisions.add(
            "mla", latent, *source_and_reason(not latent, "latents take a fraction of the memory of keys and values")
        )
    decisions.add(
        "deterministic_inference",
        deterministic,
        *source_and_reason(deterministic, "kernels may round by how a batch is made up, and are faster"),
    )
    dtype = load.dtype or ("bfloat16" if device == "cuda" else "float32")
    need = attention_need(facts, machine, device, kv or dtype, dtype, latent, deterministic, trees)
    decode, prefill = _attention(load.attention_backend, need, machine, facts.heads)
    decisions.add(
        WISH,
        load.attention_backend or "auto",
        *source_and_reason(load.attention_backend is not None, "the fastest that fits"),
    )
    for role, one in (("decode", decode), ("prefill", prefill)):
        decisions.add(DECISION_NAMES[role], one.name, one.source, "" if one.source == USER else one.reason)
    products = resolve_products(config, facts, machine, device, decode.name, decisions)
    return KernelConfig(
        **{role: one.name for role, one in products.items()},
        decode=decode.name,
        prefill=prefill.name,
        kv=kv,
        latent=latent,
        deterministic=deterministic,
    )


def _kv(config: Options) -> str:
    """Type of the KV cache by our name, "" for the model's."""
    wish = config.memory.kv_cache_dtype or ""
    return KV_NAMES.get(wish, wish)


def _attention(
    wish: str | None, need: AttentionNeed, machine: Machine, heads: int
) -> tuple[Selected[AttentionCaps], Selected[AttentionCaps]]:
    """Decode and prefill. A wish fills the operations that its backend has; the others are chosen. The reference does
    both or none.
    """
    decoding, filling = decode_catalog(machine, heads), prefill_catalog(machine)
    known = list(dict.fromkeys((*decoding, *filling)))
    if wish is not None and wish not in known:
        raise UnsupportedConfig(f"{WISH}: unknown backend {wish!r}; there is {', '.join(known)}")
    fits = any(_has(wish, catalog, need) for catalog in (decoding, filling))
    decode = select(WISH, need, decoding, _of(wish, decoding, need, fits))
    filler = _of(wish, filling, need, fits)
    if decode.name == "reference" and filler == "auto":
        return decode, decode
    return decode, select(WISH, need, filling, filler)


def _has(wish: str | None, catalog: Mapping[str, AttentionCaps], need: AttentionNeed) -> bool:
    return wish is not None and wish in catalog and need.heads in catalog[wish].heads


def _of(wish: str | None, catalog: Mapping[str, AttentionCaps], need: AttentionNeed, fits: bool) -> str:
    """The wish where its backend has the operation for this kind of heads; where it has none for them at all, `choose`
    will say so.
    """
    return wish if wish is not None and (_has(wish, catalog, need) or (wish in catalog and not fits)) else "auto"
