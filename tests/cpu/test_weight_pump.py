"""Weights from files to a device: what is read, in which pieces, and that all of it arrives. Streams and events are
fakes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu.ranks import layouts
from tests.cpu.test_sharded_models import SHAPES, loaded, written
from thalweg.core.errors import CheckpointError
from thalweg.parallel.layout import Layout
from thalweg.quant.scheme import TensorSpec
from thalweg.weights import pump as pumping
from thalweg.weights.pump import FilePiece, FileSlice, pieces, pump
from thalweg.weights.stream import SINGLE, Read, Safetensors

ROWS, COLUMNS = slice(2, 5), slice(1, 3)


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


def test_a_slice_is_a_number_of_runs() -> None:
    span = FileSlice(Path("a"), 8, (6, 4), torch.bfloat16)
    assert span.taken(()) == span
    rows, columns, both = (span.taken(take) for take in ((ROWS,), (slice(None), COLUMNS), (ROWS, COLUMNS)))
    assert (rows.offset, rows.runs, rows.shape, rows.rest) == (8 + 2 * 8, 1, (3, 4), ())
    assert columns == FileSlice(Path("a"), 8 + 2, (6, 2), torch.bfloat16, runs=6, pitch=8)
    assert both == FileSlice(Path("a"), 8 + 2 * 8 + 2, (3, 2), torch.bfloat16, runs=3, pitch=8)
    assert [(one.offset, one.at, one.run, one.runs) for one in pieces([both], 9)] == [(26, 0, 4, 2), (42, 8, 4, 1)]
    stacked = FileSlice(Path("a"), 0, (9, 6, 4), torch.int8)
    one = stacked.taken((slice(3, 4), slice(None), COLUMNS))
    assert (one.offset, one.runs, one.pitch, one.rest) == (3 * 24 + 1, 6, 4, ())
    assert stacked.taken((ROWS, ROWS, COLUMNS)).rest == (slice(None), slice(None), COLUMNS)


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
        (slice(3, 30), slice(1, 20, 3)),
        (slice(3, 3), slice(1, 20)),
    ]
    with Safetensors(tmp_path) as stream:
        assert stream.specs["w9"] == TensorSpec("w9", (64, 33), stream.specs["w9"].dtype)
        assert stream.specs["codes"].dtype == torch.float8_e4m3fn
        plain = list(stream.deliver([Read("w9", take) for take in takes], cuda))
        (whole,) = stream.deliver([Read("w9")], cuda)
        pumped = pump([stream._slices["w9"].taken(take) for take in takes], cuda)
        for take, one, other in zip(takes, pumped, plain, strict=True):
            assert torch.equal(one, whole[take]) and torch.equal(other, whole[take])


def test_a_file_that_shrinks_while_it_is_read_is_named(cuda: torch.device, tmp_path: Path) -> None:
    published(tmp_path)
    with Safetensors(tmp_path) as stream:
        span = stream._slices["w39"]
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[: span.offset + 50])
    for some in (span, span.taken((slice(None), slice(3)))):
        with pytest.raises(CheckpointError, match=f"{SINGLE} ends at byte {span.offset + 50}: download it again"):
            list(pump([some], cuda))


@pytest.mark.parametrize("shape", ["qwen2.5", "v3-fp8"])
def test_ranks_read_each_byte_about_once(
    shape: str, cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together as many as one rank alone, and the tensors that all hold."""
    folder, copied = written(tmp_path, SHAPES[shape]), list[int]()

    def counted(spans: list[FileSlice]) -> Iterator[FilePiece]:
        copied.extend(span.size for span in spans)
        return pieces(spans, pumping.PIECE)

    def pumped(stream: Safetensors, reads: list[Read], device: torch.device) -> Iterator[torch.Tensor]:
        return pump([stream._slices[read.name].taken(read.take) for read in reads], device)

    def read_by(every: list[Layout]) -> int:
        copied.clear()
        for layout in every:
            with monkeypatch.context() as patch:
                patch.setattr(Safetensors, "deliver", pumped)
                got = loaded(folder, layout).state_dict()
            want = loaded(folder, layout).state_dict()
            assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())
        return sum(copied)

    monkeypatch.setattr(pumping, "PIECE", 1 << 16)
    monkeypatch.setattr(pumping, "pieces", counted)
    alone = read_by(layouts())
    assert alone <= read_by(layouts(tp=2)) <= 1.05 * alone
    assert alone <= read_by(layouts(tp=4)) <= 1.1 * alone


def test_what_ranks_share_leaves_the_disk_once(cuda: torch.device, tmp_path: Path) -> None:
    """The page cache keeps it for the others."""

    def bytes_from_disk() -> int:
        return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])

    save_file({"shared": torch.ones(1 << 22)}, tmp_path / SINGLE)
    with (tmp_path / SINGLE).open("rb") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = bytes_from_disk()
    for _ in range(4):
        with Safetensors(tmp_path) as stream:
            (tensor,) = pump([stream._slices["shared"]], cuda)
            assert tensor.sum() == 1 << 22
    assert bytes_from_disk() - before <= 1.1 * (tmp_path / SINGLE).stat().st_size
