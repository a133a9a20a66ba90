"""Which scheme a checkpoint's weights have. To add one: a file, and a row in `METHODS`.

A stored weight says itself what it is: by its dtype and by the tensors beside it. `quantization_config` says it for
weights that are not there, as those that `make-checkpoint` and `--load-format dummy` invent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from thalweg.core.errors import CheckpointError
from thalweg.quant.fp8_block import Fp8Block
from thalweg.quant.scheme import UNQUANTIZED, Quantized, Scheme, TensorSpec

METHODS: dict[str, Callable[[Mapping[str, Any], str], Scheme]] = {
    "fp8": Fp8Block.of_config,
}
PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# weights that DeepSeek publishes in bf16 whatever the rest is
NEVER_QUANTIZED = re.compile(r"embed_tokens|lm_head|shared_head|norm|mlp\.gate\.|weights_proj|eh_proj")


def scheme_of(config: Mapping[str, Any], where: str = "config.json") -> Scheme:
    """The scheme that a quantization_config declares for quantized weights; empty is none. Raises CheckpointError for
    an unknown method.
    """
    if not config:
        return UNQUANTIZED
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{where}: quantization_config.quant_method {method!r} is not supported; there is {', '.join(METHODS)}."
            " Take the unquantized checkpoint, or one in a format named here"
        )
    return METHODS[method](config, where)


class Schemes(Protocol):
    """Tells the scheme of each weight of one checkpoint."""

    def of(self, weight: TensorSpec) -> Scheme:
        """weight: its name and shape, in the dtype of an unquantized checkpoint. Raises CheckpointError."""


class Declared:
    """By quantization_config alone."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.scheme = scheme_of(config)
        lists = (config.get("modules_to_not_convert"), config.get("ignored_layers"))
        self._excluded = tuple(str(module) for modules in lists for module in modules or ())

    def of(self, weight: TensorSpec) -> Scheme:
        module = weight.name.rpartition(".")[0]
        excluded = any(
            module == one or module.startswith(one + ".") or f".{one}." in f".{module}." for one in self._excluded
        )
        return UNQUANTIZED if excluded or NEVER_QUANTIZED.search(weight.name) else self.scheme


class Stored:
    """By the headers of a checkpoint: a weight with a plain dtype is not quantized, whatever config.json says."""

    def __init__(self, found: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> None:
        self.found, self.scheme = found, scheme_of(config)

    def of(self, weight: TensorSpec) -> Scheme:
        held, scheme = self.found.get(weight.name), self.scheme
        is_plain = held is not None and held.dtype in PLAIN_DTYPES
        if is_plain or not weight.dtype.is_floating_point or (held is None and len(weight.shape) != 2):
            scheme = UNQUANTIZED
        elif held is not None and scheme is UNQUANTIZED:
            raise CheckpointError(
                f"{weight.name} is {held.dtype}, and config.json has no quantization_config that says how it is scaled"
            )
        if held is None and scheme.stored(weight)[0].name not in self.found:  # missing, says the loader
            return UNQUANTIZED
        scheme.check(weight, self.found)
        return scheme


def quantized(config: Mapping[str, Any]) -> Quantized | None:
    """The scheme that a quantization_config declares, if there is one."""
    scheme = scheme_of(config)
    return scheme if isinstance(scheme, Quantized) else None
