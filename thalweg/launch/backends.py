"""The catalogs of backends that the resolver chooses from, in order of preference, and what a model needs of each.

A backend is a row here; a capability is a field, which every row must answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.core.capabilities import Capabilities, Requirements

BOTH = frozenset({True, False})


@dataclass(frozen=True)
class AttentionCaps(Capabilities):
    """device: "cpu" or "cuda". chip: of the GPU, "" on a CPU. heads: "mla" (latents), "mha" (an MLA model's
    decompressed keys and values) or "gqa". sparse: DSA's chosen context. kv: type of the KV cache. dtype: of
    activations. installed: whether it is. deterministic: whether bits may have to be independent of the batch. trees:
    whether drafts may part ways, so that tokens do not see all before them. graphs: whether a CUDA graph can hold it;
    no need, a reason to do without graphs.
    """

    device: frozenset[str]
    chip: frozenset[str]
    heads: frozenset[str]
    sparse: frozenset[bool]
    kv: frozenset[str]
    dtype: frozenset[str]
    installed: frozenset[bool]
    deterministic: frozenset[bool]
    trees: frozenset[bool]
    graphs: frozenset[bool]


@dataclass(frozen=True)
class AttentionNeed(Requirements):
    device: str
    chip: str
    heads: str
    sparse: bool
    kv: str
    dtype: str
    deterministic: bool
    trees: bool = False
    installed: bool = True


CHIPS = {"8.0": "ampere", "8.6": "ampere", "8.7": "ampere", "8.9": "ada", "9.0": "hopper"}  # by compute capability
NEWER = "blackwell"

REFERENCE = AttentionCaps(
    device=frozenset({"cpu", "cuda"}),
    chip=frozenset({"", "older", *CHIPS.values(), NEWER}),
    heads=frozenset({"mla", "mha", "gqa"}),
    sparse=BOTH,
    kv=frozenset({"float32", "bfloat16", "fp8_e4m3"}),
    dtype=frozenset({"float32", "bfloat16"}),
    installed=frozenset({True}),
    deterministic=BOTH,
    trees=BOTH,
    graphs=frozenset({False}),
)
TORCH = replace(  # what no kernel does yet
    REFERENCE,
    device=frozenset({"cuda"}),
    heads=frozenset({"mla"}),
    sparse=frozenset({True}),
    kv=frozenset({"bfloat16", "fp8_e4m3"}),
    dtype=frozenset({"bfloat16"}),
    installed=frozenset(),
)
TRITON = AttentionCaps(
    device=frozenset({"cuda"}),
    chip=frozenset({*CHIPS.values(), NEWER}),
    heads=frozenset({"mla", "mha", "gqa"}),
    sparse=frozenset({False}),
    kv=frozenset({"bfloat16", "fp8_e4m3"}),
    dtype=frozenset({"bfloat16"}),
    installed=frozenset(),
    deterministic=BOTH,
    trees=BOTH,
    graphs=BOTH,
)
FLASHMLA = replace(
    TRITON,
    chip=frozenset({"hopper"}),
    heads=frozenset({"mla"}),
    deterministic=frozenset({False}),
    trees=frozenset({False}),
)
FA3 = replace(TRITON, chip=frozenset({"hopper"}), heads=frozenset({"mla", "gqa"}), deterministic=frozenset({False}))
FLASHINFER = replace(  # compiles when first used, and plans on the host: never chosen, only asked for
    TRITON,
    chip=frozenset({"hopper"}),
    heads=frozenset({"mla", "gqa"}),
    kv=frozenset({"bfloat16"}),
    deterministic=frozenset({False}),
    trees=frozenset({False}),
    graphs=frozenset({False}),
)

FEW_AND_MANY, MANY_HEADS = "triton+flashmla", 64

# by operation; "installed" is filled in by what the machine has
DECODE = {
    "triton": TRITON,
    FEW_AND_MANY: replace(FLASHMLA, trees=BOTH),  # by the number of rows, and own kernels for trees
    "flashmla": FLASHMLA,
    "torch": TORCH,
    "reference": REFERENCE,
    "flashinfer": FLASHINFER,
}
PREFILL = {
    "fa3": FA3,
    "triton": TRITON,
    "torch": TORCH,
    "reference": REFERENCE,
    "flashinfer": replace(FLASHINFER, heads=frozenset({"gqa"})),
}


def decode_catalog(machine: Machine, heads: int) -> dict[str, AttentionCaps]:
    """Backends of decode rows, in order of measured preference. FlashMLA is faster where many heads make attention
    bound by the tensor cores (H100, us a layer with its share of a schedule for 27, FlashMLA / ours: 128 heads, 8 x
    1,024 tokens 29 / 38, 128 x 1,024 95 / 156, 64 x 4,096 135 / 270; 64 heads 23 / 29, 72 / 86, 133 / 173; in FP8 from
    32 rows on), and no faster with 16.
    """
    found = _present(DECODE, machine)
    return {FEW_AND_MANY: found[FEW_AND_MANY]} | found if heads >= MANY_HEADS else found


def prefill_catalog(machine: Machine) -> dict[str, AttentionCaps]:
    """Backends of the other rows, in order of measured preference. H100, TFLOP/s, fa3 / ours: 8,192 tokens of 16 heads
    751 / 459.
    """
    return _present(PREFILL, machine)


def _present(catalog: dict[str, AttentionCaps], machine: Machine) -> dict[str, AttentionCaps]:
    """With what is installed filled in: a library stands on our own kernels for all around it."""
    return {
        name: caps
        if name == "reference"
        else replace(caps, installed=frozenset({{*name.split("+"), "triton"} - {"torch"} <= machine.libraries}))
        for name, caps in catalog.items()
    }


def attention_need(
    facts: ModelFacts,
    machine: Machine,
    device: str,
    kv: str,
    dtype: str,
    latent: bool,
    deterministic: bool,
    trees: bool = False,
) -> AttentionNeed:
    heads = "gqa" if facts.mla is None else "mla" if latent else "mha"
    return AttentionNeed(
        device=device,
        chip=chip(machine) if device == "cuda" else "",
        heads=heads,
        sparse=facts.indexer is not None,
        kv=kv,
        dtype=dtype,
        deterministic=deterministic,
        trees=trees,
    )


def chip(machine: Machine) -> str:
    """The generation of the machine's first GPU."""
    if machine.capability in CHIPS:
        return CHIPS[machine.capability]
    return NEWER if machine.capability and float(machine.capability) >= 10 else "older"
