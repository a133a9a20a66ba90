"""Where named tensors come from. A stream knows names, dtypes and shapes before it reads anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.quant.catalog import Declared, Schemes, Stored
from thalweg.quant.scheme import Read, Take, TensorSpec
from thalweg.weights.pump import FileSlice, pump

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {  # as a safetensors header spells them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Stream(Protocol):
    """A source of checkpoint tensors."""

    specs: Mapping[str, TensorSpec]  # what it has, in the order in which it is cheapest to read

    def deliver(self, reads: Sequence[Read], device: torch.device) -> Iterator[Tensor]:
        """The slices in order, on the device. A tensor is the caller's, and is best let go before the next."""


class _File(Protocol):
    """What is used of an open safetensors file; the library has no types."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _Slice: ...


class _Slice(Protocol):
    def __getitem__(self, take: tuple[slice, ...]) -> Tensor: ...


class Safetensors:
    """A folder of *.safetensors, memory-mapped: one file, or shards with an index. A context manager.

    Raises CheckpointError, naming the file, for a missing folder, index or shard, a truncated file, or an index that
    does not fit.
    """

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._files: dict[str, _File] = {}  # by file name
        self._slices: dict[str, FileSlice] = {}  # by tensor
        index = folder / INDEX
        try:
            if index.exists():
                file_of = self._open_shards(folder, _weight_map(index))
            else:
                self._open(folder / SINGLE)
                file_of = dict.fromkeys(self._files[SINGLE].keys(), SINGLE)
        except BaseException:
            self._stack.close()
            raise
        self._file_of = file_of
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(name, self._slices[name].shape, self._slices[name].dtype) for name in file_of
        }

    def _open_shards(self, folder: Path, file_of: dict[str, str]) -> dict[str, str]:
        """Returns the file of each tensor, sorted by file."""
        missing = sorted({file for file in file_of.values() if not (folder / file).exists()})
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} shards named in {INDEX} are missing: {', '.join(missing[:5])}; download them"
                " again"
            )
        for file in sorted(set(file_of.values())):
            self._open(folder / file)
        for file in self._files:
            present = set(self._files[file].keys())
            absent = [name for name, place in file_of.items() if place == file and name not in present]
            if absent:
                raise CheckpointError(
                    f"{folder / file}: {INDEX} puts {absent[0]} there (and {len(absent) - 1} more), but it does not"
                    " hold it"
                )
            file_of |= {name: file for name in present if name not in file_of}
        return dict(sorted(file_of.items(), key=lambda item: item[1]))

    def _open(self, path: Path) -> None:
        try:
            self._files[path.name] = self._stack.enter_context(safe_open(path, framework="pt"))
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent} holds neither {SINGLE} nor {INDEX}: nothing to load") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is truncated or no safetensors file ({error}): download it again") from None
        self._slices |= _tensors_in(path)

    def deliver(self, reads: Sequence[Read], device: torch.device) -> Iterator[Tensor]:
        """On the CPU they are views of the mapped files; a GPU gets them through pinned memory (`weights.pump`)."""
        if device.type == "cuda":
            return pump([self._slices[read.name].taken(read.take) for read in reads], device)
        return (self._read(*read) for read in reads)

    def _read(self, name: str, take: Take) -> Tensor:
        file = self._files[self._file_of[name]]
        return file.get_slice(name)[take] if take else file.get_tensor(name)

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
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }

    def deliver(self, reads: Sequence[Read], device: torch.device) -> Iterator[Tensor]:
        for name, take in reads:
            yield (self._tensors[name][take] if take else self._tensors[name]).to(device)


def schemes_in(folder: Path, quantization_config: Mapping[str, Any]) -> Schemes:
    """The schemes of the weights in a folder, by their headers; by the configuration alone where there are no files.
    Raises CheckpointError.
    """
    if not any(folder.glob("*.safetensors*")):
        return Declared(quantization_config)
    with Safetensors(folder) as stream:
        return Stored(stream.specs, quantization_config)


def _tensors_in(path: Path) -> dict[str, FileSlice]:
    """Where each tensor of a safetensors file lies: 8 bytes of length, so much JSON, then the data that the JSON's
    offsets count from.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    unknown = {entry["dtype"] for entry in header.values()} - DTYPES.keys()
    if unknown:
        raise CheckpointError(f"{path}: tensors of type {', '.join(sorted(unknown))}; there is {', '.join(DTYPES)}")
    return {
        name: FileSlice(path, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), DTYPES[entry["dtype"]])
        for name, entry in header.items()
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
