"""What a checkpoint of a model looks like as it is published: every tensor's name, shape and type, out of the tables that the loader walks."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError
from thalweg.layers.parts import ReferenceParts
from thalweg.models import catalog
from thalweg.quant import fp8_block
from thalweg.weights.stream import FP8_SPREAD
from thalweg.weights.table import Table

PLAIN = ("bfloat16", "float16", "float32")
NEVER_FP8 = re.compile(r"embed_tokens|lm_head|shared_head|norm|mlp\.gate\.|weights_proj|eh_proj")  # DeepSeek-V3's list
ALWAYS_FLOAT32 = re.compile(r"e_score_correction_bias|indexer\.k_norm")


@dataclass(frozen=True, slots=True)
class Published:
    """like: the tensor whose numbers it repeats, itself for most. spread, centre: standard deviation and mean of its random numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    like: str
    spread: float
    centre: float = 0.0


def published(facts: ModelFacts, nextn: bool) -> list[Published]:
    """Every tensor, in the order of the tables. nextn: with the NextN layers' too, where the model has some.

    Raises CheckpointError for an architecture that nothing computes or a type that no checkpoint is published in.
    """
    if facts.dtype not in PLAIN:
        raise CheckpointError(f"config.json: torch_dtype {facts.dtype!r}; weights are drawn in {', '.join(PLAIN)}")
    model = catalog.assemble(facts, ReferenceParts(getattr(torch, facts.dtype), torch.device("meta")))
    found = _of(model.table(), model, facts)
    if nextn and facts.nextn:
        layer = catalog.build_nextn(model)
        found += _of(layer.table(), layer, facts)
        there = f"model.layers.{facts.layers}"  # it repeats the main model's embedding and head
        for name, like in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            one = next(one for one in found if one.name == f"{like}.weight")
            found.append(Published(f"{there}.{name}.weight", one.shape, one.dtype, one.name, one.spread))
    return found


def _of(table: Table, module: object, facts: ModelFacts) -> list[Published]:
    assert isinstance(module, nn.Module)
    parameters, found = dict(module.named_parameters()), list[Published]()
    for name, rules in table.by_source().items():
        rule = rules[0]
        shape = rule.shape or tuple(parameters[rule.target].data[rule.into].shape)
        found += _stored(name, shape, facts)
    return found


def _stored(name: str, shape: tuple[int, ...], facts: ModelFacts) -> list[Published]:
    """The tensor, with its multipliers behind it if it is FP8."""
    plain = torch.float32 if ALWAYS_FLOAT32.search(name) else getattr(torch, facts.dtype)
    if len(shape) == 1:
        # the router's bias is small beside its scores, so that routing stays about uniform
        spread = 0.02 if "e_score" in name else 0.1
        return [Published(name, shape, plain, name, spread, 0.0 if name.endswith("bias") else 1.0)]
    if name == "model.embed_tokens.weight" and not facts.tied:
        return [Published(name, shape, plain, name, 1.0)]
    spread = shape[-1] ** -0.5  # of inputs of variance 1, outputs of variance 1
    if facts.fp8_block is None or NEVER_FP8.search(name):
        return [Published(name, shape, plain, name, spread)]
    blocks = tuple(-(-size // step) for size, step in zip(shape, facts.fp8_block, strict=True))
    scale, step = fp8_block.scale_name(name), spread / FP8_SPREAD
    return [
        Published(name, shape, torch.float8_e4m3fn, name, FP8_SPREAD),
        # unlike one another, so that a wrong one shows
        Published(scale, blocks, torch.float32, scale, step / 10, step),
    ]
