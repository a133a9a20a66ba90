"""What `thalweg quantize` makes of each tensor of a checkpoint, and the configuration that says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from thalweg.core.errors import UnsupportedConfig
from thalweg.layers.reference import ReferenceLayers
from thalweg.models import catalog
from thalweg.quant.catalog import NEVER_QUANTIZED, Declared, Stored
from thalweg.quant.compressed_tensors import PackedInts
from thalweg.quant.fp8_block import KERNEL_BLOCK, Fp8Block
from thalweg.quant.matching import by_part, by_pattern, is_expert
from thalweg.quant.scheme import UNQUANTIZED, Read, Scheme, TensorSpec
from thalweg.quant.w4afp8 import W4aFp8
from thalweg.quantize.round import check_groups
from thalweg.quantize.targets import Config, config_of
from thalweg.weights.stream import Safetensors

SHAPE, INPUT = "weight_shape", "input_scale"


class QuantizeRequest(NamedTuple):
    """What the command line asks for."""

    format: str
    modules: str | None = None
    group_size: int | None = None
    ignore: Sequence[str] = ()


@dataclass(frozen=True)
class WeightJob:
    """A weight, and how it is stored in the source and in the result. Without a weight: a tensor that is copied."""

    weight: TensorSpec
    source: Scheme
    target: Scheme
    reads: tuple[Read, ...]
    writes: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.writes)

    @property
    def is_copied(self) -> bool:
        """Whether the stored tensors stay, perhaps under other names."""
        if isinstance(self.source, Fp8Block) and isinstance(self.target, Fp8Block):
            return self.source.block == self.target.block
        return self.source is self.target is UNQUANTIZED

    @property
    def module(self) -> str:
        return self.weight.name.removesuffix(".weight")


def plan_jobs(
    folder: Path, stream: Safetensors, request: QuantizeRequest, has_inputs: bool
) -> tuple[Config, list[WeightJob]]:
    """The quantization_config of the result, and each of its tensors in the order of the source.

    has_inputs: with static scales of experts' activations, where the format has them. Raises CheckpointError, and
    UnsupportedConfig for a request that does not fit the model.
    """
    facts = catalog.read_facts(folder)
    dtype = catalog.published_dtype(facts)
    model = catalog.assemble(facts, ReferenceLayers(dtype, torch.device("meta"), published=dtype))
    tables = [model.table()] + ([catalog.build_nextn(model).table()] if facts.nextn else [])
    weights = {spec.name: spec for table in tables for spec in table.sources()}
    stored = Stored(stream.specs, facts.quantization_config)
    found = [(weight, stored.of(weight)) for weight in weights.values()]
    # a model may have tensors that not every checkpoint of it has
    found = [(weight, scheme) for weight, scheme in found if scheme is not UNQUANTIZED or weight.name in stream.specs]
    # a next-token layer repeats the head, which nothing reads
    copied = [(spec, UNQUANTIZED) for spec in stream.specs.values() if spec.name.endswith("shared_head.head.weight")]
    config = _config(request, [*found, *copied], facts.moe is not None)
    declared, jobs, done = Declared(config), list[WeightJob](), set[str]()
    for weight, source in found:
        reads = source.reads(weight, ())
        done |= {*(read.name for read in reads), *(spec.name for spec in source.stored(weight)), *source.beside(weight)}
        target = written(declared.of(weight)) if len(weight.shape) == 2 else UNQUANTIZED
        job = _job(weight, source, target, reads, stream)
        if has_inputs and isinstance(target, W4aFp8):
            name = target.named(weight, INPUT)
            job = replace(job, writes=(*job.writes, TensorSpec(name, (1,), torch.float32)))
        if not job.is_copied:
            check_groups(target, weight)
        jobs.append(job)
    jobs += [_copy(spec) for name, spec in stream.specs.items() if name not in done]
    order = {name: place for place, name in enumerate(stream.specs)}
    return config, sorted(jobs, key=lambda job: order[job.reads[0].name])


def _config(request: QuantizeRequest, found: Sequence[tuple[TensorSpec, Scheme]], has_experts: bool) -> Config:
    """With the full names of all linear modules that stay plain: other engines must not expect codes there."""
    matrices = {weight.name.removesuffix(".weight"): scheme for weight, scheme in found if len(weight.shape) == 2}
    ignored = _ignored(request.ignore, list(matrices))
    keeps_fp8 = any(
        isinstance(scheme, Fp8Block) and scheme.block == KERNEL_BLOCK and not is_expert(module)
        for module, scheme in matrices.items()
    )
    wanted = request.format, request.modules, request.group_size
    declared = Declared(config_of(*wanted, (), has_experts, keeps_fp8))
    plain = []
    for module, scheme in matrices.items():
        target = declared.of(TensorSpec(f"{module}.weight", (1, 1), torch.bfloat16))
        # beside experts that are rounded, what is FP8 stays FP8, and what is plain stays plain
        stays_plain = isinstance(target, Fp8Block) and request.format != "fp8" and scheme is UNQUANTIZED
        stays_plain &= request.format != "w4afp8"
        if (module in ignored or target is UNQUANTIZED or stays_plain) and "embed_tokens" not in module:
            plain.append(module)
    return config_of(*wanted, plain, has_experts, keeps_fp8)


def _ignored(entries: Sequence[str], modules: Sequence[str]) -> set[str]:
    """The modules that `--ignore` names. Raises UnsupportedConfig for an entry that names none."""
    found = set[str]()
    for entry in entries:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise UnsupportedConfig(f"--ignore {entry}: no regular expression: {error}") from None
            matches = by_pattern([entry])
        else:
            matches = by_part([entry])
        named = {module for module in modules if matches(module)}
        if not named:
            example = next((module for module in modules if not NEVER_QUANTIZED.search(module + ".")), "")
            raise UnsupportedConfig(f"--ignore {entry}: no module is called so; one is {example}")
        found |= named
    return found


def written(scheme: Scheme) -> Scheme:
    """With the type of scales that is written."""
    is_int = isinstance(scheme, PackedInts | W4aFp8)
    return replace(scheme, scale_types=(torch.bfloat16,)) if is_int else scheme  # type: ignore[type-var]


def _job(weight: TensorSpec, source: Scheme, target: Scheme, reads: tuple[Read, ...], stream: Safetensors) -> WeightJob:
    if target is UNQUANTIZED:
        dtype = stream.specs[weight.name].dtype if source is UNQUANTIZED else weight.dtype
        return WeightJob(weight, source, target, reads, (replace(weight, dtype=dtype),))
    writes = target.stored(weight)
    if isinstance(target, PackedInts):
        writes += (TensorSpec(target.named(weight, SHAPE), (2,), torch.int64),)
    job = WeightJob(weight, source, target, reads, writes)
    if job.is_copied:  # scales keep their type
        held = [stream.specs[read.name] for read in reads]
        job = replace(job, writes=tuple(replace(spec, dtype=h.dtype) for spec, h in zip(writes, held, strict=True)))
    return job


def _copy(spec: TensorSpec) -> WeightJob:
    return WeightJob(spec, UNQUANTIZED, UNQUANTIZED, (Read(spec.name),), (spec,))
