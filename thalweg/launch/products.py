"""The catalogs of what computes experts and products with FP8 weights, in order of measured preference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.config.options import Options
from thalweg.core.capabilities import Capabilities, Requirements, Selected, select
from thalweg.core.kernels import DECISION_NAMES
from thalweg.core.report import USER
from thalweg.launch.backends import CHIPS, NEWER, chip
from thalweg.launch.decisions import Decisions
from thalweg.quant.catalog import quantized

BOTH = frozenset({True, False})
LIBRARY = {"deep_gemm": "deep_gemm", "triton+deep_gemm": "deep_gemm"}  # what has to be installed


@dataclass(frozen=True)
class ProductCaps(Capabilities):
    """attention: "reference" or "kernels": who computes attention computes the rest. chip: of the GPU, "" on a CPU.
    weights: "plain" or "fp8". installed: whether its library is. deterministic: whether bits may have to be independent
    of the batch.
    """

    attention: frozenset[str]
    chip: frozenset[str]
    weights: frozenset[str]
    installed: frozenset[bool]
    deterministic: frozenset[bool]


@dataclass(frozen=True)
class ProductNeed(Requirements):
    attention: str
    chip: str
    weights: str
    deterministic: bool
    installed: bool = True


REFERENCE = ProductCaps(
    attention=frozenset({"reference"}),
    chip=frozenset({"", "older", *CHIPS.values(), NEWER}),
    weights=frozenset({"plain", "fp8"}),
    installed=frozenset({True}),
    deterministic=BOTH,
)
TRITON = ProductCaps(
    attention=frozenset({"kernels"}),
    chip=frozenset({*CHIPS.values(), NEWER}),
    weights=frozenset({"plain", "fp8"}),
    installed=frozenset({True}),
    deterministic=BOTH,
)
HOPPER = replace(TRITON, chip=frozenset({"hopper"}), deterministic=frozenset({False}))  # tested there alone

ONLY_FP8 = replace(HOPPER, weights=frozenset({"fp8"}))

# of bf16 experts our own are as fast at any number of tokens (8,192 of V2-Lite on an H100: 2.27 ms a layer, DeepGEMM
# 2.32)
EXPERTS = {"triton+deep_gemm": ONLY_FP8, "triton": TRITON, "deep_gemm": HOPPER, "reference": REFERENCE}
FP8 = {
    "triton+deep_gemm": ONLY_FP8,
    "triton": replace(TRITON, weights=frozenset({"fp8"})),
    "deep_gemm": ONLY_FP8,
    "cublas": ONLY_FP8,
    "reference": replace(REFERENCE, weights=frozenset({"fp8"})),
}


def resolve_products(
    config: Options, facts: ModelFacts, machine: Machine, device: str, attention: str, decisions: Decisions
) -> dict[str, Selected[ProductCaps]]:
    """Decides what the model needs, and notes it: by field of `KernelConfig`. What the user named is decided in any
    case, so that a wish which means nothing is refused. Raises UnsupportedConfig.
    """
    load = config.load
    need = ProductNeed(
        attention="reference" if attention == "reference" else "kernels",
        chip=chip(machine) if device == "cuda" else "",
        weights="plain" if quantized(facts.quantization_config) is None else "fp8",
        deterministic=load.deterministic_inference,
    )
    made: dict[str, Selected[ProductCaps]] = {}
    if facts.moe is not None or load.moe_runner_backend is not None:
        made["moe"] = _choose("moe", need, EXPERTS, load.moe_runner_backend, machine)
    if quantized(facts.quantization_config) is not None or load.fp8_gemm_backend is not None:
        made["fp8_gemm"] = _choose("fp8_gemm", need, FP8, load.fp8_gemm_backend, machine)
    for role, one in made.items():
        decisions.add(DECISION_NAMES[role], one.name, one.source, "" if one.source == USER else one.reason)
    return made


def _choose(
    role: str, need: ProductNeed, catalog: Mapping[str, ProductCaps], wish: str | None, machine: Machine
) -> Selected[ProductCaps]:
    present = {
        name: replace(caps, installed=frozenset({LIBRARY[name] in machine.libraries})) if name in LIBRARY else caps
        for name, caps in catalog.items()
    }
    return select(DECISION_NAMES[role], need, present, wish or "auto")
