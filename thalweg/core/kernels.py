"""Kernel configuration: plain data that the resolver makes and the layer factories read."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

TORCH = "torch"  # attention in plain torch, Triton kernels for the rest
RECORD, RECORD_TILE = "fp8_ds_mla", 128  # KV cache type of records, see `memory.records`; numbers that share a scale
FLASHMLA_HEADS = (64, 128)  # of its sparse kernels; other numbers are filled up
LATENT_TILE = 64  # dims of latents in a step of the product with W_UV, which masks none
TORCH_ATTENTION = ("reference", TORCH)  # backends whose attention is plain torch


MOST_HOT_ENTRIES = 1 << 15  # of a hot set: their numbers are int16


class KernelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Backends that a model runs on."""

    # Attention backends. "reference" is plain torch on any device, and then every other operation is, too.
    decode: str = "reference"
    prefill: str = "reference"
    moe: str = "triton"  # backend of the experts
    fusion: bool | None = None  # of shared experts with routed ones; None: where both are stored alike
    fp8_gemm: str = "triton"  # backend of products with FP8 weights
    kv: str = ""  # type of the KV cache, a key of `memory.planes.CODECS`; "": the model's dtype
    topk: str = "triton"  # what chooses the highest scores of an indexer beside kernels; or "torch"
    index_scores: str = "triton"  # what computes them, a key of `config.backends.INDEX_SCORES`
    fp8_index: bool = False  # index keys and queries are e4m3 with scales
    latent: bool = True  # an MLA model caches latents; False: it caches decompressed keys and values
    hot: int = 0  # entries of a slot's hot set, with latents in host memory (`kernels.swap_in`); 0: on the device
    deterministic: bool = False  # the bits of a token depend on nothing but its own sequence


TuningValues = tuple[int | str, ...]  # numbers and names that a tile or a shape consists of


class TunedKernel(msgspec.Struct, frozen=True):
    """A result of `thalweg tune`: `choice` is faster than `default` on this machine."""

    operation: str
    key: TuningValues  # shape of the weight
    default: TuningValues  # from the operation's own table
    choice: TuningValues


class CheckCase(NamedTuple):
    """What a library's self-check computes: the shape of the model that will use it."""

    backend: str = ""  # its name
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    value_dim: int = 128
    is_fp8_cache: bool = False
    is_fp8: bool = False  # weights are FP8


# names of the fields' decisions in the report
DECISION_NAMES = {
    "decode": "decode_attention_backend",
    "prefill": "prefill_attention_backend",
    "moe": "moe_runner_backend",
    "fp8_gemm": "fp8_gemm_backend",
    "index_scores": "dsa_paged_mqa_logits_backend",
}
