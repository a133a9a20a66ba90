"""Rounds linear layers by what they compute on a text, a layer of the model at a time.

A layer's weights and the text's activations are in memory; of experts, only how large their inputs grow is kept.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from thalweg.batch.batch import Batch, Group
from thalweg.config.model import ModelFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.plan import PAGE
from thalweg.layers.linear import Linear
from thalweg.layers.moe import Experts
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.decoder import Decoder, StageValue
from thalweg.models.stages import PipelineStage
from thalweg.quant.pairs import NibblePairs
from thalweg.quant.scaled import CHANNEL, ScaledCodes
from thalweg.quant.scheme import Scheme, TensorSpec
from thalweg.quantize.feedback import BLOCK, round_with_feedback, second_moments
from thalweg.quantize.round import E4M3_MAX, Grouped
from thalweg.weights.loader import load
from thalweg.weights.stream import Safetensors

LENGTH = 2048  # tokens of a sequence
ERROR, PART, LARGEST = "error of ", " part ", "largest input of "


@dataclass(frozen=True)
class Calibration:
    """A text as token ids."""

    ids: tuple[int, ...]
    length: int  # tokens of a sequence

    @staticmethod
    def of_text(text: str, encode: Callable[[str], Sequence[int]], tokens: int, context: int) -> Calibration:
        """The first so many tokens. Raises UnsupportedConfig for a text that has few."""
        length, ids = min(LENGTH, context), tuple(encode(text[: 16 * tokens]))[:tokens]
        if len(ids) < min(length, 128):
            raise UnsupportedConfig(f"--calibrate: a text of {len(ids)} tokens is too short: give some thousands")
        return Calibration(ids, length)

    def batch(self, device: torch.device) -> Batch:
        """All sequences in full, on pages of their own from page 1 on."""
        lengths = self.lengths
        table = torch.zeros(len(lengths), -(-self.length // PAGE), dtype=torch.int64)
        groups, positions, places, page, token = list[Group](), [], [], 1, 0
        for row, length in enumerate(lengths):
            pages = -(-length // PAGE)
            table[row, :pages] = torch.arange(page, page + pages)
            groups.append(Group(row, 1, token, length, length))
            positions.append(torch.arange(length))
            places.append(page * PAGE + positions[-1])
            page, token = page + pages, token + length
        return Batch(
            ids_T=torch.tensor(self.ids, device=device),
            positions_T=torch.cat(positions).to(device),
            write_T=torch.cat(places).to(device),
            table_RP=table.to(device),
            real_T=torch.ones(token, dtype=torch.bool, device=device),
            logits_indices_N=torch.zeros(0, dtype=torch.int64, device=device),
            groups=tuple(groups),
        )

    @property
    def digest(self) -> str:
        return hashlib.blake2b(repr(self).encode()).hexdigest()

    @property
    def pages(self) -> int:
        """Of the cache, the null page included."""
        return 1 + sum(-(-length // PAGE) for length in self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Of the sequences."""
        return [len(self.ids[first : first + self.length]) for first in range(0, len(self.ids), self.length)]


@dataclass
class Inputs:
    """What the matrices of a layer read."""

    of: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # by the weight's name: [T, K]
    largest: dict[str, float] = field(default_factory=dict)  # absolute value of an expert's, by the weight's name


def recorded(model: Decoder) -> Inputs:
    """The inputs that the model's linear layers are going to have."""
    inputs = Inputs()
    for module in model.modules():
        if isinstance(module, Linear):
            names = [rule.source.name for rule in module.weights.rules if rule.target == "weight"]
            _watch_linear(module, names, inputs)
        elif isinstance(module, Experts):
            _watch_experts(module, inputs)
    return inputs


def _watch_linear(module: Linear, names: Sequence[str], inputs: Inputs) -> None:
    forward, add = module.forward, module.add_

    def seen(x: Tensor) -> Tensor:
        copy = x.detach().clone()
        for name in names:
            inputs.of[name].append(copy)
        return x

    module.__dict__["forward"] = lambda x: forward(seen(x))
    module.__dict__["add_"] = lambda h, x: add(h, seen(x))


def _watch_experts(module: Experts, inputs: Inputs) -> None:
    add = module.add_
    names = {(rule.into[0], rule.source.name.split(".")[-2]): rule.source.name for rule in module.weights.rules}

    def watched(out_TH: Tensor, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        for expert in range(len(module.w13)):
            rows = x_TH[(ids_TK == expert).any(1)]
            if len(rows):
                gate, up = (rows @ module.w13[expert].t()).chunk(2, 1)
                inner = float((F.silu(gate) * up).abs().max())
                for half, value in (("gate_proj", float(rows.abs().max())), ("down_proj", inner)):
                    name = names[expert, half]
                    inputs.largest[name] = max(value, inputs.largest.get(name, 0.0))
                inputs.largest[names[expert, "up_proj"]] = inputs.largest[names[expert, "gate_proj"]]
        add(out_TH, x_TH, weights_TK, ids_TK)

    module.__dict__["add_"] = watched


@dataclass(frozen=True)
class Calibrated:
    """Results of a calibration, in a folder with a file for each layer."""

    folder: Path
    where: Mapping[str, Path]  # the file of each weight

    def tensors(self, name: str) -> tuple[tuple[Tensor, ...], tuple[float, float]] | None:
        """Those to write for a weight, and the squared error and size of its outputs; None: it is rounded to
        nearest.
        """
        if name not in self.where:
            return None
        with safe_open(self.where[name], "pt") as held:
            count = sum(key.startswith(f"{name}{PART}") for key in held.keys())
            parts = tuple(held.get_tensor(f"{name}{PART}{i}") for i in range(count))
            squared, total = held.get_tensor(ERROR + name).tolist()
        return parts, (squared, total)


def feeds_back(scheme: Scheme) -> bool:
    """Whether a scheme's scales are of groups of columns that feedback can follow."""
    if isinstance(scheme, ScaledCodes):
        return scheme.steps == CHANNEL
    return isinstance(scheme, NibblePairs) and 0 < scheme.group <= BLOCK


def calibrate(
    model: Path,
    targets: Mapping[str, Scheme],
    text: Calibration,
    folder: Path,
    device: torch.device,
    numbers: Callable[[str], Tensor],
    largest: Callable[[str], float],
    progress: Callable[[int, int], None],
) -> Calibrated:
    """Rounds the linear layers among `targets`, the schemes by the weight's name, and writes a file for each layer into
    `folder`. Layers whose file is there are not rounded again.

    numbers: of a weight, as it is published, on the device. largest: as in `round.encode`. progress: called
    with the layers done, and all of them.
    """
    facts = catalog.read_facts(model)
    folder.mkdir(parents=True, exist_ok=True)
    value: StageValue | None = None
    batch, where = text.batch(device), dict[str, Path]()
    for layer in range(facts.layers):
        path = folder / f"layer-{layer:05}.safetensors"
        value, inputs = _run_layer(facts, model, layer, batch, value, text.pages, device)
        if not path.exists():
            found = _rounded(targets, inputs, numbers, largest)
            save_file(found, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
        with safe_open(path, "pt") as held:
            where |= {key.removeprefix(ERROR): path for key in held.keys() if key.startswith(ERROR)}
        progress(layer + 1, facts.layers)
    return Calibrated(folder, where)


@torch.inference_mode()
def _run_layer(
    facts: ModelFacts,
    model: Path,
    layer: int,
    batch: Batch,
    received: StageValue | None,
    pages: int,
    device: torch.device,
) -> tuple[StageValue, Inputs]:
    """The value behind a layer, and what its matrices read."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    factory = ReferenceLayers(dtype, device, published=catalog.published_dtype(facts))
    # the last stage would norm: its layer is run as one before it
    stage = PipelineStage(layer, layer + 1, max(facts.layers, layer + 2))
    decoder: Any = catalog.assemble(facts, factory, stage)
    with Safetensors(model) as stream:
        load(decoder, decoder.table(), stream, facts.quantization_config)
    inputs = recorded(decoder)
    value = decoder.run(batch, Planes(decoder.planes(), pages, device=device), received)
    return value, inputs


def _rounded(
    targets: Mapping[str, Scheme],
    inputs: Inputs,
    numbers: Callable[[str], Tensor],
    largest: Callable[[str], float],
) -> dict[str, Tensor]:
    """What the file of a layer holds."""
    found = dict[str, Tensor]()
    read, moments = list[Tensor](), torch.empty(0)
    for name, seen in inputs.of.items():
        scheme = targets.get(name)
        if scheme is None or not feeds_back(scheme) or not seen:
            continue
        assert isinstance(scheme, NibblePairs | ScaledCodes)
        if not read or seen[0] is not read[0]:  # neighbours read the same
            read, moments = seen, second_moments(torch.cat(seen))
        weight = numbers(name)
        tensors = round_with_feedback(scheme, weight, moments, largest(name))
        found |= {f"{name}{PART}{i}": tensor.contiguous().cpu() for i, tensor in enumerate(tensors)}
        found[ERROR + name] = _output_error(scheme, weight, tensors, moments)
    return found | {LARGEST + name: torch.tensor(value) for name, value in inputs.largest.items()}


def _output_error(scheme: Grouped, weight: Tensor, tensors: tuple[Tensor, ...], moments_KK: Tensor) -> Tensor:
    """Squared error and size of the outputs, float64 [2]."""
    spec = TensorSpec("x.weight", tuple(weight.shape), torch.float32)
    difference = scheme.decode(spec, tensors, ()).float() - weight
    both = [((part @ moments_KK) * part).sum() for part in (difference, weight)]
    return torch.stack(both).double().cpu()


def input_scales(calibrated: Calibrated) -> dict[str, float]:
    """The static scale of the FP8 activations of each expert that some token chose, by the weight's name."""
    return {
        key.removeprefix(LARGEST): float(value) / E4M3_MAX
        for path in sorted(calibrated.folder.glob("layer-*.safetensors"))
        for key, value in load_file(path).items()
        if key.startswith(LARGEST)
    }
