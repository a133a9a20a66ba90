"""A model with one layer of each kind, which runs the kernels of the whole model in a fraction of the time."""

from __future__ import annotations

import copy

from torch import nn

from thalweg.models.interface import Model


def one_layer_of_each_kind(model: Model) -> Model:
    """The model with one layer of each kind and shared parameters, so that its kernels are those of the whole model."""
    assert isinstance(model, nn.Module) and isinstance(model.layers, nn.ModuleList)
    by_kind = {
        tuple((name, parameter.shape, parameter.dtype) for name, parameter in layer.named_parameters()): layer
        for layer in reversed(model.layers)
    }
    slim = copy.copy(model)
    slim._modules = dict(model._modules)
    slim.layers = nn.ModuleList(reversed(by_kind.values()))
    vars(slim)["watched"] = (0,) * len(vars(model)["watched"])  # as many, of the layers that there are
    return slim
