"""A model with one layer of each kind, which runs the kernels of the whole model in a fraction of the time."""

from __future__ import annotations

import copy

from torch import nn

from thalweg.models.interface import Model


def one_layer_of_each_kind(model: Model) -> Model:
    """The model with one layer of each kind and shared parameters, so that its kernels are those of the whole model."""
    assert isinstance(model, nn.Module) and isinstance(model.layers, nn.ModuleList)
    by_kind: dict[tuple[object, ...], nn.Module] = {}  # in the order of the model: a layer may need an earlier kind's
    for layer in model.layers:
        kind = tuple((name, parameter.shape, parameter.dtype) for name, parameter in layer.named_parameters())
        by_kind.setdefault(kind, layer)
    slim = copy.copy(model)
    slim._modules = dict(model._modules)
    slim.layers = nn.ModuleList(by_kind.values())
    vars(slim)["watched"] = (0,) * len(vars(model)["watched"])  # as many, of the layers that there are
    return slim
