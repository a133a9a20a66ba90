"""Sources of named tensors. A stream knows names, dtypes and shapes before it reads anything."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.core.files import check_regular
from thalweg.quant.catalog import Declared, Schemes, Stored, is_code_name
from thalweg.quant.scheme import Read, TensorSpec
from thalweg.weights.index import INDEX, read_weight_map
from thalweg.weights.pump import FileSlice, pieces, pump

SINGLE = "model.safetensors"
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


class Safetensors:
    """A folder of *.safetensors, memory-mapped: one file, or shards with an index. A context manager.

    Raises CheckpointError, naming the file, for a missing folder, index or shard, a truncated file, or an index that
    does not fit.
    """

    def __init__(self, folder: Path) -> None:
        self._mapped: dict[Path, Tensor] = {}  # bytes of files that the CPU reads
        try:
            self._slices = _tensors_of_shards(folder, read_weight_map(folder / INDEX))
        except FileNotFoundError:
            self._slices = _tensors_in(folder / SINGLE)
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(name, place.shape, place.dtype) for name, place in self._slices.items()
        }

    def deliver(self, reads: Sequence[Read], device: torch.device) -> Iterator[Tensor]:
        """On the CPU they are views of the mapped files; a GPU gets them through pinned memory (`weights.pump`)."""
        places = [self._slices[read.name].taken(read.take) for read in reads]
        return pump(places, device) if device.type == "cuda" else map(self._read, places)

    def _read(self, place: FileSlice) -> Tensor:
        path = place.path
        if path not in self._mapped:
            self._mapped[path] = torch.from_file(str(path), False, path.stat().st_size, dtype=torch.uint8)
        run = place.size // max(place.runs, 1)
        data = self._mapped[path].as_strided((place.runs, run), (place.pitch, 1), place.offset)
        if place.offset % place.dtype.itemsize:
            data = data.clone()  # an aligned copy
        tensor = data.view(place.dtype).view(place.shape)
        return tensor[place.rest] if place.rest else tensor

    def copy(self, read: Read) -> Tensor:
        """A slice in memory of its own, for work on one after the other: nothing stays mapped. From any thread."""
        place = self._slices[read.name].taken(read.take)
        data = torch.empty(place.size, dtype=torch.uint8)
        with place.path.open("rb") as file:
            for piece in pieces([place]):
                piece.read(file.fileno(), data.numpy().data[piece.at : piece.at + piece.size])
        tensor = data.view(place.dtype).view(place.shape)
        return tensor[place.rest] if place.rest else tensor

    def __enter__(self) -> Safetensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._mapped.clear()


def schemes_in(folder: Path, quantization_config: Mapping[str, Any]) -> Schemes:
    """The schemes of the weights in a folder, by their headers; by the configuration alone where there are no files.
    Raises CheckpointError.
    """
    if not any(folder.glob("*.safetensors*")):
        return Declared(quantization_config)
    with Safetensors(folder) as stream:
        return Stored(stream.specs, quantization_config)


def may_be_quantized(folder: Path) -> bool:
    """Whether the index of a folder names a tensor that only quantized weights have; True for a folder without index.
    Raises CheckpointError for a broken index.
    """
    try:
        return any(map(is_code_name, read_weight_map(folder / INDEX)))
    except FileNotFoundError:
        return True


def readable_specs(folder: Path) -> Mapping[str, TensorSpec]:
    """The tensors of a folder by its headers; {} where files are missing or damaged, which the loader reports."""
    try:
        with Safetensors(folder) as stream:
            return stream.specs
    except CheckpointError:
        return {}


def _tensors_of_shards(folder: Path, file_of: Mapping[str, str]) -> dict[str, FileSlice]:
    """Location of each tensor of the shards, in the order of the files."""
    files = sorted(set(file_of.values()))
    missing = [file for file in files if not os.path.exists(folder / file)]  # False for a name that no file can have
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} shards named in {INDEX} are missing: {', '.join(missing[:5])}; download them"
            " again"
        )
    places: dict[str, FileSlice] = {}
    for file in files:
        present = _tensors_in(folder / file)
        absent = [name for name, place in file_of.items() if place == file and name not in present]
        if absent:
            raise CheckpointError(
                f"{folder / file}: {INDEX} puts {absent[0]} there (and {len(absent) - 1} more), but it does not hold it"
            )
        places |= {name: place for name, place in present.items() if file_of.get(name, file) == file}
    return places


def _tensors_in(path: Path) -> dict[str, FileSlice]:
    """Location of each tensor in a safetensors file: 8 bytes of length, so much JSON, then the data that the JSON's
    offsets count from.
    """
    try:
        check_regular(path)
        with safe_open(path, framework="pt"):
            pass  # the library checks the header against the size of the file
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds neither {SINGLE} nor {INDEX}: nothing to load") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or no safetensors file ({error}): download it again") from None
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
