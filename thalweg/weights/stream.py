"""Where named tensors come from. A stream knows names, dtypes and shapes before it reads anything."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Iterable, Iterator, NamedTuple, Protocol, Sequence

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.weights.pump import Span, pump

PIECE = 1 << 27  # elements that are drawn at a time
FP8_BLOCK, FP8_SPREAD = 128, 64.0  # columns of a block; standard deviation of drawn codes, whose largest is 448
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {  # as a safetensors header spells them
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Read(NamedTuple):
    """A tensor, or only that slice of it; an empty `take` is all of it."""

    name: str
    take: tuple[slice, ...] = ()


class Stream(Protocol):
    """A source of checkpoint tensors."""

    def names(self) -> Iterable[str]:
        """The names it has, in the order in which they are cheapest to read."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, take: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, or only that slice of it, on the CPU, as published."""

    def deliver(self, reads: Sequence[Read], device: torch.device) -> Iterator[Tensor]:
        """What `read` gives for each, in order, on the device. A tensor is the caller's, and is best let go before the next."""


class _File(Protocol):
    """What is used of an open safetensors file; the library has no types."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _Slice: ...


class _Slice(Protocol):
    def __getitem__(self, take: tuple[slice, ...]) -> Tensor: ...


class Safetensors:
    """A folder of *.safetensors, memory-mapped: one file, or shards with an index. A context manager.

    Raises CheckpointError, naming the file, for a missing folder, index or shard, a truncated file, or an index that does not fit.
    """

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._where: dict[str, str] = {}
        self._files: dict[str, _File] = {}
        self._spans: dict[str, Span] = {}
        index = folder / INDEX
        try:
            if index.exists():
                self._open_shards(folder, _weight_map(index))
            else:
                self._open(folder / SINGLE)
                self._where = dict.fromkeys(self._files[SINGLE].keys(), SINGLE)
        except BaseException:
            self._stack.close()
            raise

    def _open_shards(self, folder: Path, where: dict[str, str]) -> None:
        missing = sorted({file for file in where.values() if not (folder / file).exists()})
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} shards named in {INDEX} are missing: {', '.join(missing[:5])}; download them again"
            )
        for file in sorted(set(where.values())):
            self._open(folder / file)
        for file in self._files:
            held = set(self._files[file].keys())
            absent = [name for name, place in where.items() if place == file and name not in held]
            if absent:
                raise CheckpointError(
                    f"{folder / file}: {INDEX} puts {absent[0]} there (and {len(absent) - 1} more), but it does not hold it"
                )
            where |= {name: file for name in held if name not in where}
        self._where = dict(sorted(where.items(), key=lambda item: item[1]))

    def _open(self, path: Path) -> None:
        try:
            self._files[path.name] = self._stack.enter_context(safe_open(path, framework="pt"))
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent} holds neither {SINGLE} nor {INDEX}: nothing to load") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is truncated or no safetensors file ({error}): download it again") from None
        self._spans |= _spans(path)

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._spans[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._spans[name].dtype

    def read(self, name: str, take: tuple[slice, ...] = ()) -> Tensor:
        file = self._files[self._where[name]]
        return file.get_slice(name)[take] if take else file.get_tensor(name)

    def deliver(self, reads: Sequence[Read], device: torch.device) -> Iterator[Tensor]:
        """On the CPU they are views of the mapped files; a GPU gets them through pinned memory (`weights.pump`)."""
        if device.type == "cuda":
            return pump([self._spans[read.name].taken(read.take) for read in reads], device)
        return (self.read(*read) for read in reads)

    def __enter__(self) -> Safetensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class InMemory:
    """Tensors that are already here: an update of some of the weights, or a test."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, take: tuple[slice, ...] = ()) -> Tensor:
        return self._tensors[name][take] if take else self._tensors[name]

    def deliver(self, reads: Sequence[Read], device: torch.device) -> Iterator[Tensor]:
        return (self.read(*read).to(device) for read in reads)


def _spans(path: Path) -> dict[str, Span]:
    """Where each tensor of a safetensors file lies: 8 bytes of length, so much JSON, then the data that the JSON's offsets count from."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    unknown = {one["dtype"] for name, one in header.items() if name != "__metadata__"} - DTYPES.keys()
    if unknown:
        raise CheckpointError(f"{path}: tensors of type {', '.join(sorted(unknown))}; there is {', '.join(DTYPES)}")
    return {
        name: Span(path, 8 + length + one["data_offsets"][0], tuple(one["shape"]), DTYPES[one["dtype"]])
        for name, one in header.items()
        if name != "__metadata__"
    }


def _weight_map(index: Path) -> dict[str, str]:
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is no safetensors index ({error!r}): download it again") from None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index}: weight_map must be an object of file names")
    elsewhere = [file for file in where.values() if Path(file).name != file]
    if elsewhere:
        raise CheckpointError(f"{index}: {elsewhere[0]!r} is no name of a file beside it")
    return dict(where)


def fill_dummy(module: torch.nn.Module, seed: int = 0) -> None:
    """Random parameters that keep activations near 1, the same at every call on a kind of device: norms 1 ± 0.1, biases small, weights
    fan_in^-1/2, FP8 weights as codes of that spread with equal multipliers. Integers, which say what stands for what, stay as they are made."""
    parameters = dict(sorted(module.named_parameters()))
    device = next(iter(parameters.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    tied = "head.weight" not in parameters
    with torch.inference_mode():
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                continue
            spread = 1.0
            if parameter.dim() == 1:
                spread = 0.1
            elif tied or name != "embedding.weight":
                # uv is stored with its inputs first, every other weight with them last
                spread = parameter.shape[-2 if name.endswith(".uv") else -1] ** -0.5
            if name.endswith("_scale"):
                parameter.fill_((parameter.shape[-1] * FP8_BLOCK) ** -0.5 / FP8_SPREAD)
                continue
            offset = 1.0 if parameter.dim() == 1 and not name.endswith("bias") else 0.0
            spread = FP8_SPREAD if parameter.dtype == torch.float8_e4m3fn else spread
            # the noise is float32, so of a large one a part at a time
            rows = max(PIECE * len(parameter) // max(parameter.numel(), 1), 1)
            for part in torch.split(parameter.data, rows):
                noise = torch.randn(part.shape, generator=generator, device=device)
                part.copy_(noise.mul_(spread).add_(offset))
