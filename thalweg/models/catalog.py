"""Which class computes an architecture. To add a model: a file and a row here."""

from __future__ import annotations

from typing import Callable

import torch

from thalweg.attention.selection import Selection, best
from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError
from thalweg.layers.parts import Parts, ReferenceParts
from thalweg.models.base import Model, Target
from thalweg.models.deepseek import Deepseek
from thalweg.models.llama import Llama
from thalweg.models.nextn import NextN
from thalweg.models.qwen2 import Qwen2
from thalweg.models.qwen3 import Qwen3

Build = Callable[[ModelFacts, Parts], Target]

ARCHITECTURES: dict[str, Build] = {
    "DeepseekV2ForCausalLM": Deepseek,
    "DeepseekV3ForCausalLM": Deepseek,
    "DeepseekV32ForCausalLM": Deepseek,
    "GlmMoeDsaForCausalLM": Deepseek,
    "KimiK2ForCausalLM": Deepseek,
    "LlamaForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
}


def assemble(facts: ModelFacts, parts: Parts) -> Target:
    """The empty model of these facts; a loader fills it. Raises CheckpointError when no class computes `facts.architecture`."""
    if facts.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json: architecture {facts.architecture!r} is unknown; there is {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[facts.architecture](facts, parts)


def build(
    facts: ModelFacts, dtype: torch.dtype, device: torch.device | str = "cpu", selection: Selection = best
) -> Target:
    """The empty model in plain torch. selection: what chooses the context under DSA. Raises CheckpointError as `assemble`."""
    return assemble(facts, ReferenceParts(dtype, torch.device(device), selection))


def build_nextn(main: Model) -> NextN:
    """The empty NextN layer behind `main`, of the same parts. Raises CheckpointError when the checkpoint has none."""
    if not isinstance(main, Deepseek):
        raise CheckpointError(f"{main.facts.architecture} has no NextN layer")
    return NextN(main)
