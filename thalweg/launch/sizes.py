"""The sizes of a model and its drafter, counted on the meta device: shapes without storage, so no weights are read."""

from __future__ import annotations

from collections import Counter
from math import prod

import torch

from thalweg.config.backends import TRITON
from thalweg.config.engine import EngineConfig
from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.engine.build import DTYPES, layer_factory
from thalweg.launch.resolved import Plane, Sizes
from thalweg.layers.factory import LayerFactory
from thalweg.layers.reference import ReferenceLayers
from thalweg.models import catalog
from thalweg.quant.catalog import Declared
from thalweg.quant.scheme import Quantized
from thalweg.sampling.catalog import draft_sampling_for
from thalweg.spec.catalog import build_drafter
from thalweg.weights.table import WeightRule, table_of, unchanged

META = torch.device("meta")


def measure(facts: ModelFacts, config: EngineConfig) -> Sizes:
    """Raises CheckpointError for an architecture that is unknown, or a drafter that is not there."""
    factory = meta_factory(facts, config)
    model = catalog.assemble(facts, factory)
    sampling = draft_sampling_for(config.speculative_acceptance, config.num_drafts, facts.vocab, META)
    folder = config.speculative_draft_model_path
    drafter = build_drafter(config.speculative_algorithm, model, folder, sampling, config.tree)
    modules = [part for part in (model, *drafter.modules(), *drafter.own()) if isinstance(part, torch.nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    stored = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    layers: Counter[str] = Counter()
    page_bytes: Counter[str] = Counter()
    for plane in (*model.planes(), *drafter.planes()):
        layers[plane.name] += 1
        page_bytes[plane.name] += plane.page_bytes
    is_quantized = isinstance(factory, ReferenceLayers) and config.decode_attention_backend != "reference"
    saved = sum(_saved_bytes(module, facts) for module in modules) if is_quantized else 0
    tree_nodes = 3 * torch.int64.itemsize * config.tree.num_drafts * config.tree.is_tree  # all but the root
    return Sizes(
        sum(prod(source.shape) for module in modules for source in table_of(module).sources()),
        stored - saved,
        tuple(Plane(name, layers[name], page_bytes[name] // PAGE) for name in layers),
        sum(prod(field.shape) * field.dtype.itemsize for field in drafter.fields()) + tree_nodes,
    )


def meta_factory(facts: ModelFacts, config: EngineConfig) -> LayerFactory:
    """Makes layers on the meta device: those of the kernels, or, for a GPU that is planned for on a machine without
    Triton, the reference's with the same planes.
    """
    if config.decode_attention_backend == "reference" or TRITON.is_installed():
        return layer_factory(facts, "meta", config.kernels, config.dtype)
    return ReferenceLayers(DTYPES[config.dtype], META, config.kernels)


def _saved_bytes(module: torch.nn.Module, facts: ModelFacts) -> int:
    """How many bytes fewer the module's weights take where memory holds them as the checkpoint stores them."""
    schemes, parameters = Declared(facts.quantization_config), dict(module.named_parameters())
    return sum(_saved_by_rule(rule, schemes, parameters[rule.target].itemsize) for rule in table_of(module).rules)


def _saved_by_rule(rule: WeightRule, schemes: Declared, itemsize: int) -> int:
    scheme, shape = schemes.of(rule.source), rule.source.shape
    if not isinstance(scheme, Quantized) or not scheme.holds(rule.take, shape, rule.transform is not unchanged):
        return 0
    held = sum(prod(part) * dtype.itemsize for part, dtype in scheme.parameters(shape).values())
    return prod(shape) * itemsize - held
