"""Which model computes an architecture. To add a family: a file with its layer, and rows in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from thalweg.attention.context import WorkspaceNeed
from thalweg.config.model import (
    READ,
    ModelFacts,
    architecture_of,
    check_read,
    facts_of,
    read_config,
    with_index_pattern,
)
from thalweg.core.errors import CheckpointError
from thalweg.layers.factory import LayerFactory
from thalweg.models import deepseek, dense
from thalweg.models.decoder import Decoder, MakeLayer
from thalweg.models.interface import Model
from thalweg.models.nextn import NextN
from thalweg.models.stages import PipelineStage
from thalweg.quant.catalog import config_of_tensors, format_of, is_of_quantized
from thalweg.quant.files import FIELD, with_quantization
from thalweg.weights.stream import may_be_quantized, readable_specs


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: its model class, and the reader of its config.json."""

    layer: MakeLayer
    workspace: Callable[[ModelFacts], WorkspaceNeed]  # what attention of a step takes
    fields: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # DeepSeek's name of a field of config.json → the family's names
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that config.json leaves out
    own_fields: tuple[str, ...] = ()  # of config.json, for its layers: `ModelFacts.family_fields`
    has_nextn: bool = False  # checkpoints may have NextN layers of this kind


DEEPSEEK = Family(deepseek.DeepseekLayer, deepseek.workspace, has_nextn=True)
LLAMA = Family(dense.DenseLayer, dense.workspace)
MISTRAL = Family(dense.DenseLayer, dense.workspace, defaults={"use_sliding_window": True})
QWEN2 = Family(dense.DenseLayer, dense.workspace, fields={"qkv_bias": ("attention_bias",)}, defaults={"qkv_bias": True})
QWEN3 = Family(dense.QwenNormedLayer, dense.workspace)
QWEN3_MOE = Family(
    dense.QwenNormedLayer, dense.workspace,
    fields={"n_routed_experts": ("num_experts", "num_local_experts")},
    defaults={"scoring_func": "softmax"},
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "DeepseekV32ForCausalLM": DEEPSEEK,
    "GlmMoeDsaForCausalLM": DEEPSEEK,
    "KimiK2ForCausalLM": DEEPSEEK,
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}


class UnsupportedFormat(CheckpointError):
    """How a checkpoint's weights are stored is not supported."""


def read_facts(folder: Path, index_pattern: str = "") -> ModelFacts:
    """Reads `folder`/config.json. index_pattern: see `with_index_pattern`. Raises CheckpointError when it is missing,
    no JSON object, nonsense, or of an architecture that is not in `FAMILIES`, and for quantized tensors that nothing
    describes; and UnsupportedConfig for the pattern.
    """
    config, where = with_quantization(read_config(folder, "a model"), folder), str(folder / "config.json")
    if not config.get(FIELD) and may_be_quantized(folder):
        config = {**config, FIELD: config_of_tensors(readable_specs(folder))}
    try:
        return with_index_pattern(read_config_facts(config, where), index_pattern)
    except UnsupportedFormat as error:
        name = next((spec.name for spec in readable_specs(folder).values() if is_of_quantized(spec)), "")
        raise CheckpointError(f"{error}{name and f'. Its first quantized tensor is {name}'}") from None


def states_quantization(folder: Path) -> bool:
    """Whether the format of a checkpoint follows without its tensors. Raises CheckpointError as `read_facts`."""
    return bool(with_quantization(read_config(folder, "a model"), folder).get(FIELD)) or not may_be_quantized(folder)


def read_config_facts(config: Mapping[str, Any], where: str) -> ModelFacts:
    """The facts of a config.json's content. where: names it in errors. Raises CheckpointError as `read_facts`."""
    family = _family(architecture_of(config, where), where)
    aliases = (alias for others in family.fields.values() for alias in others)
    check_read(config, {*READ, *aliases, *family.own_fields}, where)
    facts = facts_of(config, where, family.fields, family.defaults)
    own = {name: config.get(name, family.defaults.get(name)) for name in family.own_fields}
    facts = structs.replace(facts, family_fields=own)
    try:
        format_of(facts.quantization_config, where)
    except CheckpointError as error:
        raise UnsupportedFormat(str(error)) from None
    return facts


def _family(architecture: str, where: str) -> Family:
    if architecture not in FAMILIES:
        raise CheckpointError(f"{where}: architecture {architecture!r} is unknown; there is {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def assemble(facts: ModelFacts, factory: LayerFactory, stage: PipelineStage | None = None) -> Decoder:
    """The empty model of these facts, or a pipeline stage of it; a loader fills it. Raises CheckpointError for an
    unknown architecture.
    """
    family = _family(facts.architecture, "config.json")
    return Decoder(facts, factory, family.layer, family.workspace(facts), stage)


def published_dtype(facts: ModelFacts) -> torch.dtype:
    """The dtype of a checkpoint's unquantized weights."""
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    return known.get(facts.dtype, torch.bfloat16)


def build_nextn(main: Model) -> NextN:
    """The empty NextN layer behind `main`. Raises CheckpointError when the checkpoint has none."""
    if not isinstance(main, Decoder) or not FAMILIES[main.facts.architecture].has_nextn:
        raise CheckpointError(f"{main.facts.architecture} has no NextN layer")
    return NextN(main)
