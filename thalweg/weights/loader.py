"""Walks a table over a stream and accounts for every tensor and every parameter.

Each slice of a published tensor is read once, dequantized unless memory holds it as it is stored, transformed and
copied to where it belongs; nothing else is kept. So any subset can be rewritten into the same storage later, by the
same call with `is_partial`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError
from thalweg.memory.planes import Planes
from thalweg.quant.catalog import Stored
from thalweg.quant.scheme import Quantized, Read, Scheme, TensorSpec
from thalweg.weights.stream import Stream
from thalweg.weights.table import WeightRule, WeightTable, unchanged

Progress = Callable[[int, int], None]  # slices of tensors done, slices in all
# facts in which another checkpoint of the model may differ: how its weights are published, and what does not depend on
# them
FREE = {"context", "dtype", "bos", "eos", "quantization_config", "nextn"}
NAMES_SHOWN = 8  # in an error
NOT_QUANTIZED: Mapping[str, Any] = MappingProxyType({})


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""


def load(
    module: nn.Module,
    table: WeightTable,
    stream: Stream,
    quantization_config: Mapping[str, Any] = NOT_QUANTIZED,
    progress: Progress = no_progress,
    is_partial: bool = False,
) -> None:
    """Fills the parameters of `module`.

    quantization_config: of the stream's config.json. is_partial: some of the tensors are enough. Slices are transformed
    where the parameters lie. Raises CheckpointError naming tensors that are missing, unknown, of a wrong shape, or
    quantized in another way than `module` was built for.
    """
    parameters = dict(module.named_parameters())
    loads = plan_loads(parameters, table, stream, quantization_config, is_partial)
    written = dict.fromkeys(parameters, 0)
    reads = [read for load in loads for read in load.reads]
    arriving = stream.deliver(reads, next(iter(parameters.values())).device)
    with torch.inference_mode():
        for done, part in enumerate(loads, 1):
            part.write([next(arriving) for _ in part.reads], parameters, written)
            progress(done, len(loads))
    if not is_partial:
        _check_filled(parameters, written)


def read_cache_scales(table: WeightTable, stream: Stream, planes: Planes) -> None:
    """Puts the published scales into the FP8 planes: a stored number times the scale is the value. Planes without a
    published scale keep 1, and a scale of 0 or less stands for it, as in other engines.

    Raises CheckpointError for a scale that is not one finite number.
    """
    for (plane, layer), sources in table.cache_scales.items():
        scale = planes.scale(plane, layer)
        source = next((source for source in sources if source in stream.specs), None)
        if scale is None or source is None:
            continue
        value = next(stream.deliver([Read(source)], torch.device("cpu"))).float().reshape(-1)
        if value.numel() != 1 or not value.isfinite():
            raise CheckpointError(f"{source}: {value.tolist()[:4]} is no scale: it must be one finite number")
        scale.copy_(torch.where(value > 0, value, 1.0))


def quantization_of(folder: Path, facts: ModelFacts, read: Callable[[Path], ModelFacts]) -> dict[str, Any]:
    """The quantization_config of the tensors in `folder`: its own config.json's, or that of the model in use where it
    has none.

    read: reads a folder's config.json. Raises CheckpointError for a folder that is missing, or whose config.json is
    that of another model.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder on the engine's machine: name one that holds *.safetensors")
    if not (folder / "config.json").exists():
        return facts.quantization_config
    theirs = read(folder)
    ours, other = structs.asdict(facts), structs.asdict(theirs)
    differing = [name for name in ours if name not in FREE and ours[name] != other[name]]
    if differing:
        raise CheckpointError(
            f"{folder / 'config.json'} is of another model: {', '.join(differing)} differ. Weights are replaced, a"
            " model is not: start a server for it"
        )
    return theirs.quantization_config


def check_loadable(
    module: nn.Module,
    table: WeightTable,
    stream: Stream,
    quantization_config: Mapping[str, Any],
    progress: Progress = no_progress,
    is_required: bool = True,
) -> tuple[int, int]:
    """Checks that `load` with `is_partial` would accept the stream, and reads the values; nothing is written.

    Returns how many of the model's published tensors the stream has, and how many there are. Raises CheckpointError as
    `load`, for values that are NaN or infinite, and if the stream has no tensor of the model, unless `is_required` is
    False.
    """
    parameters = dict(module.named_parameters())
    loads = plan_loads(parameters, table, stream, quantization_config, True)
    if is_required and not loads:
        raise CheckpointError("it holds none of the model's tensors")
    reads = [read for load in loads for read in load.reads]
    tensors = stream.deliver(reads, next(iter(parameters.values())).device)
    for done, (read, tensor) in enumerate(zip(reads, tensors, strict=True), 1):
        if not _is_finite(tensor):
            raise CheckpointError(f"{read.name} holds values that are not finite numbers")
        progress(done, len(reads))
    return len({load.source.name for load in loads}), len(table.by_source())


@dataclass(frozen=True, slots=True)
class Load:
    """One slice of a published weight, and the rules that want it."""

    source: TensorSpec
    scheme: Scheme  # in which the stream stores it
    reads: tuple[Read, ...]
    rules: list[WeightRule]
    held: Quantized | None = None  # the scheme in which memory holds it

    def write(self, tensors: list[Tensor], parameters: dict[str, nn.Parameter], written: dict[str, int]) -> None:
        """tensors: what `reads` names. written: how many elements of each parameter are filled; counted on."""
        if self.held is not None:
            (rule,), places = self.rules, self.held.places(self.rules[0].into)
            for suffix, part in self.held.pack(self.source, tensors, rule.take).items():
                target = rule.target + suffix
                written[target] += _copy(self.source, target, parameters[target].data[places[suffix]], part)
            return
        value = self.scheme.decode(self.source, tensors, self.rules[0].take)
        for rule in self.rules:
            written[rule.target] += _copy(
                self.source, rule.target, parameters[rule.target].data[rule.into], rule.transform(value)
            )


def plan_loads(
    parameters: dict[str, nn.Parameter],
    table: WeightTable,
    stream: Stream,
    quantization_config: Mapping[str, Any],
    is_partial: bool,
) -> list[Load]:
    """The loads to do, in the stream's order; nothing is read yet. Raises CheckpointError for names, shapes and
    dtypes that do not fit.
    """
    rules, schemes = table.by_source(), Stored(stream.specs, quantization_config)
    loads: list[Load] = []
    used, missing = set[str](), list[str]()
    for name, rules_of_source in rules.items():
        scheme = schemes.of(rules_of_source[0].source)
        stored = scheme.stored(rules_of_source[0].source)
        if stored[0].name not in stream.specs:
            missing.append(name)
            continue
        _check_shape(stored[0], stream.specs[stored[0].name], rules_of_source[0].target)
        used |= {spec.name for spec in stored} | set(scheme.beside(rules_of_source[0].source))
        loads += _loads_of(rules_of_source, scheme, parameters)
    _account(stream, table, missing, used, is_partial)
    position = {name: index for index, name in enumerate(stream.specs)}
    return sorted(loads, key=lambda load: position[load.reads[0].name])


def _loads_of(rules: list[WeightRule], scheme: Scheme, parameters: dict[str, nn.Parameter]) -> list[Load]:
    """The slices of one published weight: one for each that memory holds as it is stored, and one for each distinct
    slice of the rest.
    """
    loads: list[Load] = []
    for rule in rules:
        name = rule.source.name
        if rule.held is not None:
            if rule.transform is not unchanged:  # a scheme whose `holds` forgets `is_reordered`
                raise CheckpointError(
                    f"{name}: {rule.target} cannot hold {rule.held.name} with its rows in another order"
                )
            if not isinstance(scheme, Quantized) or scheme.memory != rule.held.memory:
                raise CheckpointError(
                    f"{name} is {scheme.name}, and {rule.target} holds {rule.held.name} in blocks of {rule.held.block}"
                )
            loads.append(Load(rule.source, scheme, scheme.reads(rule.source, rule.take), [rule], scheme))
            continue
        if parameters[rule.target].dtype.is_floating_point != rule.source.dtype.is_floating_point:
            raise CheckpointError(f"{name}: {rule.target} is kept as {parameters[rule.target].dtype}")
        same = next((load for load in loads if load.held is None and load.rules[0].take == rule.take), None)
        if same is not None:
            same.rules.append(rule)
        else:
            loads.append(Load(rule.source, scheme, scheme.reads(rule.source, rule.take), [rule]))
    return loads


def _account(stream: Stream, table: WeightTable, missing: list[str], used: set[str], is_partial: bool) -> None:
    """used: the stream's tensors that are read, scales with them."""
    unknown = [name for name in stream.specs if name not in used and not table.is_skipped(name)]
    if unknown:
        modules = {name.rpartition(".")[0] for name in unknown}
        lacking = [name for name in missing if name.rpartition(".")[0] in modules]
        if lacking:
            raise CheckpointError(f"{len(lacking)} weights are missing, whose modules have others: {_list(lacking)}")
        raise CheckpointError(
            f"{len(unknown)} tensors of the checkpoint belong nowhere in this model: {_list(unknown)}"
        )
    if missing and not is_partial:
        raise CheckpointError(f"{len(missing)} tensors are missing from the checkpoint: {_list(missing)}")


def _check_shape(stored: TensorSpec, found: TensorSpec, target: str) -> None:
    if found.shape != stored.shape:
        raise CheckpointError(
            f"{stored.name}: shape {found.shape} does not fit config.json: {target} expects {stored.shape}"
        )


def _copy(source: TensorSpec, target: str, into: Tensor, value: Tensor) -> int:
    """Copies a slice of `source` into a slice of the parameter `target`. Returns how many elements that is."""
    if value.shape != into.shape:
        raise CheckpointError(
            f"{source.name}: shape {source.shape} does not fit config.json: {target} expects {tuple(into.shape)} of it,"
            f" got {tuple(value.shape)}"
        )
    into.copy_(value)
    return into.numel()


def _check_filled(parameters: dict[str, nn.Parameter], written: dict[str, int]) -> None:
    wrong = [
        f"{name} ({written[name]} of {parameter.numel()} elements)"
        for name, parameter in parameters.items()
        if written[name] != parameter.numel()
    ]
    if wrong:
        raise CheckpointError(f"parameters that the checkpoint does not fill exactly once: {_list(wrong)}")


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return True
    wide = tensor.to(torch.bfloat16) if tensor.dtype.itemsize == 1 else tensor
    return all(bool(end.isfinite()) for end in torch.aminmax(wide))  # NaN is both ends


def _list(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
