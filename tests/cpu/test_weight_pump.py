"""Weights from files to a device: what is read, in which pieces, and that all of it arrives. Streams and events are
fakes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from thalweg.core.errors import CheckpointError
from thalweg.quant.scheme import TensorSpec
from thalweg.weights import pump as pumping
from thalweg.weights.pump import FileSlice, pieces, pump
from thalweg.weights.stream import SINGLE, Read, Safetensors


def test_pieces_cover_each_span_once_and_in_order() -> None:
    a, b = Path("a"), Path("b")
    spans = [
        FileSlice(a, 100, (10,), torch.uint8),
        FileSlice(b, 0, (0, 4), torch.float32),
        FileSlice(a, 7, (3, 2), torch.int32),
    ]
    found = list(pieces(spans, 10))
    assert [(one.span, str(one.path), one.offset, one.at, one.size) for one in found] == [
        (0, "a", 100, 0, 10), (1, "b", 0, 0, 0), (2, "a", 7, 0, 10), (2, "a", 17, 10, 10), (2, "a", 27, 20, 4),
    ]  # fmt: skip


def test_rows_stay_in_the_file_and_columns_do_not() -> None:
    span = FileSlice(Path("a"), 8, (6, 4), torch.bfloat16)
    assert span.taken((slice(2, 5),)) == FileSlice(Path("a"), 8 + 2 * 8, (3, 4), torch.bfloat16)
    assert span.taken((slice(None), slice(1, 3))) == FileSlice(
        Path("a"), 8, (6, 4), torch.bfloat16, (slice(None), slice(1, 3))
    )
    assert span.taken(()) is span


class Now:
    """A stream or event on which everything is done at once."""

    def __init__(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, stream: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(torch.cuda, "Stream", Now)
    monkeypatch.setattr(torch.cuda, "Event", Now)
    monkeypatch.setattr(torch.cuda, "current_stream", Now)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(pumping, "pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(pumping, "PIECE", 1000)
    monkeypatch.setattr(pumping, "pieces", lambda spans: pieces(spans, 1000))
    yield torch.device("cpu")


def published(folder: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {f"w{i}": torch.randn(1 + 7 * i, 33, generator=generator).bfloat16() for i in range(40)}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(3.5)}
    tensors["codes"] = torch.randn(50, 60, generator=generator).to(torch.float8_e4m3fn)
    save_file(tensors, folder / SINGLE)
    return load_file(folder / SINGLE)


def test_everything_arrives_as_it_was(cuda: torch.device, tmp_path: Path) -> None:
    want = published(tmp_path)
    with Safetensors(tmp_path) as stream:
        got = pump([stream._slices[name] for name in want], cuda)
        for (name, tensor), one in zip(want.items(), got, strict=True):
            assert one.dtype == tensor.dtype and one.shape == tensor.shape, name
            assert torch.equal(one.view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else one == tensor, name


def test_slices_arrive_as_they_are_read(cuda: torch.device, tmp_path: Path) -> None:
    published(tmp_path)
    takes: list[tuple[slice, ...]] = [
        (slice(3, 40),),
        (slice(None), slice(5, 9)),
        (slice(2, 30), slice(4, 33)),
        (slice(0, 9, 2),),
    ]
    with Safetensors(tmp_path) as stream:
        assert stream.specs["w9"] == TensorSpec("w9", (64, 33), stream.specs["w9"].dtype)
        assert stream.specs["codes"].dtype == torch.float8_e4m3fn
        plain = list(stream.deliver([Read("w9", take) for take in takes], cuda))
        for one, want in zip(pump([stream._slices["w9"].taken(take) for take in takes], cuda), plain, strict=True):
            assert torch.equal(one, want)


def test_a_file_that_shrinks_while_it_is_read_is_named(cuda: torch.device, tmp_path: Path) -> None:
    published(tmp_path)
    with Safetensors(tmp_path) as stream:
        span = stream._slices["w39"]
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[: span.offset + 50])
    with pytest.raises(CheckpointError, match=f"{SINGLE} ends at byte {span.offset + 50}: download it again"):
        list(pump([span], cuda))
