"""Which kernels a model runs on: plain data that the resolver makes and the parts of a model are made by."""

from __future__ import annotations

import msgspec

TORCH = "torch"  # attention in plain torch beside kernels for all else
PLAIN = ("reference", TORCH)  # attention that is plain torch


class KernelChoice(msgspec.Struct, frozen=True, kw_only=True):
    """decode, prefill: backends of attention; "reference" is plain torch on any device, and then all else is, too;
    "torch" is plain torch beside the kernels of a GPU. moe, fp8_gemm: backends of
    the experts and of products with FP8 weights. kv: type of the KV cache, a name in `memory.planes.CODECS`; "" is the model's. latent: whether
    an MLA model keeps latents, which it attends to as they are; else it keeps decompressed keys and values. deterministic: whether a token's
    bits depend on nothing but its own sequence."""

    decode: str = "reference"
    prefill: str = "reference"
    moe: str = "triton"
    fp8_gemm: str = "triton"
    kv: str = ""
    latent: bool = True
    deterministic: bool = False


Choices = tuple[int | str, ...]  # numbers and names that a tile or a shape consists of


class TunedRow(msgspec.Struct, frozen=True):
    """One thing that `thalweg tune` has found: of an operation and a key (the shape of a weight) the choice that is faster than `default`, the
    one of the operation's own table."""

    operation: str
    key: Choices
    default: Choices
    choice: Choices


# the flag and the decision of each field
DECISIONS = {
    "decode": "decode_attention_backend",
    "prefill": "prefill_attention_backend",
    "moe": "moe_runner_backend",
    "fp8_gemm": "fp8_gemm_backend",
}
