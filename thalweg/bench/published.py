"""What a checkpoint of a model looks like as it is published: the tensors that the model's layers declare, with random
numbers.
"""

from __future__ import annotations

import torch

from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError
from thalweg.layers.reference import ReferenceLayers
from thalweg.models import catalog
from thalweg.quant.scheme import TensorSpec
from thalweg.weights.random import RandomTensor, random_tensors

PLAIN = ("bfloat16", "float16", "float32")


def published(facts: ModelFacts, nextn: bool) -> list[RandomTensor]:
    """Every tensor, in the order of the model. nextn: with the NextN layers' too, where the model has some.

    Raises CheckpointError for an architecture that nothing computes or a type that no checkpoint is published in.
    """
    if facts.dtype not in PLAIN:
        raise CheckpointError(f"config.json: torch_dtype {facts.dtype!r}; weights are drawn in {', '.join(PLAIN)}")
    dtype = getattr(torch, facts.dtype)
    model = catalog.assemble(facts, ReferenceLayers(dtype, torch.device("meta"), published=dtype))
    found = random_tensors(model.table(), facts.quantization_config, facts.tied)
    if nextn and facts.nextn:
        found += random_tensors(catalog.build_nextn(model).table(), facts.quantization_config, facts.tied)
        layer = f"model.layers.{facts.layers}"  # it repeats the main model's embedding and head
        for name, like in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            main = next(tensor for tensor in found if tensor.spec.name == f"{like}.weight")
            spec = TensorSpec(f"{layer}.{name}.weight", main.spec.shape, main.spec.dtype)
            found.append(RandomTensor(spec, main.spec.name, main.spread, main.centre))
    return found
