"""Writes a checkpoint anew in another format, a weight at a time.

Sizes follow from names and shapes, so files are laid out before anything is read, and each weight is written to its
place. A file that is whole has its final name: a second run goes on from there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.bench.make_checkpoint import COPIED, shards
from thalweg.bench.results import replace_file
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.files import read_object
from thalweg.core.format import format_bytes
from thalweg.quant.pairs import NibblePairs
from thalweg.quant.scheme import UNQUANTIZED, TensorSpec
from thalweg.quant.w4afp8 import W4aFp8
from thalweg.quantize.calibrate import Calibrated, Calibration, calibrate, feeds_back, input_scales
from thalweg.quantize.jobs import INPUT, SHAPE, QuantizeRequest, WeightJob, plan_jobs
from thalweg.quantize.round import encode
from thalweg.weights.index import INDEX
from thalweg.weights.stream import DTYPES, SINGLE, Safetensors

FUSED = (("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
SCRATCH, RUN = ".calibration", ".quantize.json"
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Progress = Callable[[int, int], None]


@dataclass
class Error:
    """Of weights that were rounded."""

    tensors: int = 0
    nbytes: int = 0
    squared: float = 0.0  # sum of squared differences
    total: float = 0.0  # sum of squared weights
    format: str = ""  # "calibrated": of outputs, not of weights

    @property
    def relative(self) -> float:
        """Root of the mean squared error, as a share of the weights'."""
        return (self.squared / self.total) ** 0.5 if self.total else 0.0


@dataclass
class Result:
    tensors: int
    nbytes: int
    files: int
    kept: int  # files that a former run wrote
    left_out: int = 0  # scales of activations that the source has and this checkpoint has not
    # by the last part of the module's name, and the format
    errors: dict[tuple[str, str], Error] = field(default_factory=dict)


class Source:
    """Reads weights as numbers."""

    def __init__(self, stream: Safetensors, jobs: Sequence[WeightJob], device: torch.device) -> None:
        self.stream, self.device = stream, device
        self.calibrated: Calibrated | None = None
        self.input_scales: Mapping[str, float] = {}
        self._siblings: dict[str, list[WeightJob]] = defaultdict(list)
        self._largest: dict[str, float] = {}
        for job in jobs:
            if isinstance(job.target, NibblePairs) and job.target.total:
                self._siblings[_fused(job.weight.name)].append(job)

    def tensors(self, job: WeightJob) -> list[Tensor]:
        return [self.stream.copy(read) for read in job.reads]

    def numbers(self, job: WeightJob) -> Tensor:
        """float32, on the device."""
        tensors = [tensor.to(self.device) for tensor in self.tensors(job)]
        return job.source.decode(job.weight, tensors, ()).float()

    def calibrate(
        self, model: Path, jobs: Sequence[WeightJob], text: Calibration, folder: Path, progress: Progress
    ) -> None:
        """Rounds linear layers by what they compute on the text."""
        by_name = {job.weight.name: job for job in jobs if not job.is_copied}
        targets = {name: job.target for name, job in by_name.items()}

        def numbers(name: str) -> Tensor:
            return self.numbers(by_name[name])

        def largest(name: str) -> float:
            return self.largest(by_name[name])

        self.calibrated = calibrate(model, targets, text, folder, self.device, numbers, largest, progress)
        self.input_scales = input_scales(self.calibrated)

    def largest(self, job: WeightJob) -> float:
        """Absolute value among the weights that engines join with this one: they get one scale of the tensor."""
        name = _fused(job.weight.name)
        if name not in self._largest:
            joined = self._siblings.get(name, ())
            self._largest[name] = max((float(self.numbers(other).abs().max()) for other in joined), default=0.0)
        return self._largest[name]


def _fused(name: str) -> str:
    """The name of a matrix as engines join it with its neighbours."""
    for parts in FUSED:
        for part in parts:
            if f".{part}." in name:
                return name.replace(f".{part}.", f".{'+'.join(parts)}.")
    return name


def rounded(source: Source, job: WeightJob) -> tuple[tuple[Tensor, ...], Error]:
    """The tensors to write, and the error of what was rounded. Raises UnsupportedConfig."""
    if job.is_copied:
        return tuple(source.tensors(job)), Error()
    found = source.calibrated.tensors(job.weight.name) if source.calibrated is not None else None
    if found is not None:
        tensors, (squared, total) = found
        error = Error(1, job.nbytes, squared, total, f"{job.target.name}, calibrated")
    else:
        numbers = source.numbers(job)
        if job.target is UNQUANTIZED:
            return (numbers.to(job.writes[0].dtype),), Error()
        tensors = encode(job.target, job.weight, numbers, source.largest(job))
        difference = job.target.decode(job.weight, tensors, ()).float() - numbers
        squared, total = float(difference.square().sum()), float(numbers.square().sum())
        error = Error(1, job.nbytes, squared, total, job.target.name)
    match job.writes[-1].name.rpartition(".")[2]:
        case name if name == SHAPE:
            tensors += (torch.tensor(job.weight.shape),)
        case name if name == INPUT:
            most = max(source.input_scales.values(), default=1.0)  # for an expert that no token chose
            tensors += (torch.tensor([source.input_scales.get(job.weight.name, most)]),)
    return tensors, error


class ShardWriter:
    """A safetensors file whose tensors come in any order. A context manager: the file gets its name at the end."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self.path, self._part = path, path.with_suffix(".part")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._places, end = dict[str, int](), 0
        for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):  # aligned
            begin, end = end, end + spec.nbytes
            offsets = [begin, end]
            header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
            self._places[spec.name] = begin
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._data = 8 + len(text)
        self._write(len(text).to_bytes(8, "little") + text, 0)
        os.truncate(self._file, self._data + end)

    def put(self, spec: TensorSpec, tensor: Tensor) -> None:
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype), (spec, tensor.shape, tensor.dtype)
        self._write(
            tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy(), self._data + self._places[spec.name]
        )

    def _write(self, data: Any, at: int) -> None:
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self._file, rest, at)
            rest, at = rest[count:], at + count

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            os.fsync(self._file)
        os.close(self._file)
        if kind is None:
            self._part.replace(self.path)


def convert(
    folder: Path,
    out: Path,
    request: QuantizeRequest,
    shard: int,
    device: torch.device,
    threads: int,
    progress: Progress = lambda done, total: None,
    calibration: Calibration | None = None,
    calibrating: Progress = lambda done, total: None,
) -> Result:
    """Writes the checkpoint of `folder` to `out`.

    shard: bytes of a file at most. threads: weights at a time. progress: called with the weights done, and all of
    them. calibration: a text, on whose activations linear layers are rounded. calibrating: its progress, by layers.
    Raises CheckpointError, UnsupportedConfig, OSError.
    """
    with Safetensors(folder) as stream:
        config, jobs = plan_jobs(folder, stream, request, calibration is not None)
        if calibration is not None:
            _check_calibrated(jobs)
        files = shards(jobs, lambda job: job.nbytes, shard)
        names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
        names = [SINGLE] if len(files) == 1 else names
        _prepare(folder, out, config, sum(job.nbytes for job in jobs), _run_of(folder, config, shard, calibration))
        result = Result(sum(len(job.writes) for job in jobs), sum(job.nbytes for job in jobs), len(files), 0)
        if calibration is None:
            result.left_out = sum(name.endswith(f".{INPUT}") for name in stream.specs)
        source, done = Source(stream, jobs, device), 0
        if calibration is not None and not all((out / name).exists() for name in names):
            source.calibrate(folder, jobs, calibration, out / SCRATCH, calibrating)
        for name, some in zip(names, files, strict=True):
            specs = [spec for job in some for spec in job.writes]
            if (out / name).exists():
                result.kept += 1
                done += len(some)
                progress(done, len(jobs))
                continue
            with ShardWriter(out / name, specs) as writer, ThreadPoolExecutor(threads) as pool:
                for job, (tensors, error) in _in_turn(pool, threads, source, some):
                    for spec, tensor in zip(job.writes, tensors, strict=True):
                        writer.put(spec, tensor)
                    _add(result.errors, job, error)
                    done += 1
                    progress(done, len(jobs))
    if len(files) > 1:
        where = {
            spec.name: name for name, some in zip(names, files, strict=True) for job in some for spec in job.writes
        }
        index = {"metadata": {"total_size": result.nbytes}, "weight_map": where}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(out / SCRATCH, ignore_errors=True)
    (out / RUN).unlink()
    return result


def _check_calibrated(jobs: Sequence[WeightJob]) -> None:
    """Raises UnsupportedConfig where a text changes nothing."""
    targets = [(job.weight.name, job.target) for job in jobs if not job.is_copied]
    if not any(isinstance(to, W4aFp8) or feeds_back(to) and ".experts." not in name for name, to in targets):
        message = "experts and FP8 blocks are rounded to nearest, so there is nothing that a text changes here"
        raise UnsupportedConfig(f"--calibrate: {message}")


def _in_turn(
    pool: ThreadPoolExecutor, threads: int, source: Source, jobs: Sequence[WeightJob]
) -> Iterator[tuple[WeightJob, tuple[tuple[Tensor, ...], Error]]]:
    """Results in the order of the jobs; no more of them are made ahead than there are threads."""
    running: list[tuple[WeightJob, Future[tuple[tuple[Tensor, ...], Error]]]] = []
    for job in jobs:
        running.append((job, pool.submit(rounded, source, job)))
        if len(running) > threads:
            first, future = running.pop(0)
            yield first, future.result()
    for first, future in running:
        yield first, future.result()


def _add(errors: dict[tuple[str, str], Error], job: WeightJob, error: Error) -> None:
    if not error.tensors:
        return
    where = "experts" if ".experts." in job.weight.name else job.weight.name.split(".")[-2]
    had = errors.setdefault((where, error.format), Error())
    had.tensors += 1
    had.nbytes += error.nbytes
    had.squared += error.squared
    had.total += error.total


def _run_of(folder: Path, config: Mapping[str, Any], shard: int, calibration: Calibration | None) -> str:
    """What a run that goes on must have in common with the first."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))]
    text = None if calibration is None else calibration.digest
    return json.dumps([str(folder.resolve()), files, config, shard, text]) + "\n"


def _prepare(folder: Path, out: Path, config: Mapping[str, Any], total: int, run: str) -> None:
    """config.json and the tokenizer. Raises UnsupportedConfig for a folder with something else, or a full disk."""
    if out.exists() and any(out.iterdir()):
        note = out / RUN
        if not note.exists():
            raise UnsupportedConfig(f"{out} is finished, or has other files: give a new folder")
        if note.read_text(encoding="utf-8") != run:
            raise UnsupportedConfig(
                f"{out} was begun from another model or with other flags: give those, or a new folder"
            )
    out.mkdir(parents=True, exist_ok=True)
    total -= sum(path.stat().st_size for path in out.glob("*.safetensors"))
    if total > (free := shutil.disk_usage(out).free):
        raise UnsupportedConfig(f"{out}: {format_bytes(total)} are to be written, and {format_bytes(free)} are free")
    replace_file(out / RUN, run.encode())
    own = read_object(folder / "config.json")
    for name in ("quantization_config", "compression_config"):
        own.pop(name, None)
    for pattern in COPIED:
        for file in folder.glob(pattern):
            if file.name != "config.json":
                shutil.copyfile(file, out / file.name)
    text = json.dumps(own | {"quantization_config": dict(config)}, indent=2, ensure_ascii=False) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
