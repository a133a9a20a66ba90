"""`thalweg bench make-checkpoint`: a checkpoint of random weights in the published layout, so that any engine is measured on the same ones.

Weights are scaled as `--load-format dummy` does it: activations stay near 1 and tokens choose their experts about uniformly. The files are
written piece by piece; nothing larger than a few pieces is ever in memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from thalweg.bench.published import Published, published
from thalweg.config.args import Parser
from thalweg.config.model import read_facts
from thalweg.core.errors import ThalwegError, UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.weights.stream import DTYPES, INDEX, SINGLE

PIECE = 1 << 23  # elements drawn and written at a time
THREADS = 8
E4M3_MAX = 448.0
COPIED = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.json", "merges.txt")  # fmt: skip
SPELLED = {dtype: spelling for spelling, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor at byte `offset` of a file."""

    tensor: Published
    file: str
    offset: int


def _bytes(tensor: Published) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def shards(tensors: Iterable[Published], most: int) -> list[list[Published]]:
    """Consecutive tensors of up to `most` bytes together."""
    made: list[list[Published]] = [[]]
    held = 0
    for tensor in tensors:
        if made[-1] and held + _bytes(tensor) > most:
            made.append([])
            held = 0
        made[-1].append(tensor)
        held += _bytes(tensor)
    return made


def lay_out(tensors: Sequence[Published], folder: Path, most: int) -> list[Placed]:
    """Makes the files with their headers, at their full size, and the index; says where each tensor goes."""
    files, placed, total = shards(tensors, most), list[Placed](), sum(map(_bytes, tensors))
    for number, shard in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        header, at = {"__metadata__": {"format": "pt"}}, 0
        starts = []
        for tensor in shard:
            ends = [at, at + _bytes(tensor)]
            header[tensor.name] = {"dtype": SPELLED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}  # type: ignore[dict-item]
            starts.append(at)
            at = ends[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
        placed += (Placed(one, name, 8 + len(text) + start) for one, start in zip(shard, starts, strict=True))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {one.tensor.name: one.file for one in placed}}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return placed


def draw(tensor: Published, start: int, stop: int, seed: int, device: torch.device) -> Tensor:
    """Elements [start, stop) of the flattened tensor, start a multiple of PIECE. The same at every call on a kind of device."""
    own = zlib.crc32(f"{seed} {tensor.like} {start}".encode())
    generator = torch.Generator(device).manual_seed(own)
    noise = torch.randn(stop - start, generator=generator, device=device).mul_(tensor.spread).add_(tensor.centre)
    return (noise.clamp_(-E4M3_MAX, E4M3_MAX) if tensor.dtype == torch.float8_e4m3fn else noise).to(tensor.dtype)


def _pieces(placed: Iterable[Placed]) -> Iterator[tuple[Placed, int, int]]:
    for one in placed:
        elements = math.prod(one.tensor.shape)
        for start in range(0, elements, PIECE):
            yield one, start, min(start + PIECE, elements)


def write(placed: Sequence[Placed], folder: Path, seed: int, device: torch.device, shown: bool) -> None:
    """Fills the files that `lay_out` made; shows a bar of the bytes. Raises OSError."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    total = sum(_bytes(one.tensor) for one in placed)
    with ExitStack() as stack:
        bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), disable=not shown))
        task = bar.add_task("writing weights", total=total)
        files = {name: os.open(folder / name, os.O_WRONLY) for name in dict.fromkeys(one.file for one in placed)}
        for file in files.values():
            stack.callback(os.close, file)
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))

        def fill(one: Placed, start: int, stop: int) -> int:
            drawn = draw(one.tensor, start, stop, seed, device).view(torch.uint8).cpu().numpy().data
            at, done = one.offset + start * one.tensor.dtype.itemsize, 0
            while done < len(drawn):
                done += os.pwrite(files[one.file], drawn[done:], at + done)
            return done

        work: list[Future[int]] = [pool.submit(fill, *piece) for piece in _pieces(placed)]
        for done in as_completed(work):
            bar.update(task, advance=done.result())


def make(shape: Path, out: Path, seed: int, nextn: bool, shard: int, device: torch.device, shown: bool) -> list[Placed]:
    """The checkpoint of the model whose config.json lies in `shape`, in the folder `out`. Raises CheckpointError, UnsupportedConfig, OSError."""
    tensors = published(read_facts(shape), nextn)
    if out.exists() and any(out.iterdir()):
        raise UnsupportedConfig(f"{out} is not empty: give a folder that is, or does not exist")
    out.mkdir(parents=True, exist_ok=True)
    total, free = sum(map(_bytes, tensors)), shutil.disk_usage(out).free
    if total > free:
        raise UnsupportedConfig(
            f"the checkpoint takes {format_bytes(total)}, and {format_bytes(free)} are free at {out}: give another folder"
        )
    for pattern in COPIED:
        for file in shape.glob(pattern):
            shutil.copyfile(file, out / file.name)
    placed = lay_out(tensors, out, shard)
    write(placed, out, seed, device, shown)
    return placed


def _parser() -> Parser:
    parser = Parser(
        prog="thalweg bench make-checkpoint",
        description="Writes a checkpoint of random weights in the published layout: sharded safetensors with their index, FP8 weights with "
        "their scales, config.json and the tokenizer of the shape's folder.",
        usage="thalweg bench make-checkpoint SHAPE OUT [--seed N]",
    )
    add = parser.add_argument
    add("shape", type=Path, metavar="SHAPE", help="folder with the config.json of the model")
    add("out", type=Path, metavar="OUT", help="folder that the checkpoint is written to")
    add("--seed", type=int, default=0, metavar="N", help="of the random weights (default: 0)")
    add("--shard-size", type=float, default=5.0, metavar="GB", help="most bytes of a file (default: 5)")
    add("--no-nextn", action="store_true", help="leave the NextN layers out, which some loaders do not read")
    add("--device", choices=("cpu", "cuda"), help="where the numbers are drawn (default: a GPU where there is one)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0: written, 1: it could not be."""
    args: argparse.Namespace
    try:
        args = _parser().parse_args(list(sys.argv[1:] if argv is None else argv))
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        shown = sys.stderr.isatty()
        placed = make(args.shape, args.out, args.seed, not args.no_nextn, int(args.shard_size * 1e9), device, shown)
    except (ThalwegError, OSError) as error:
        print(f"thalweg bench make-checkpoint: {error}", file=sys.stderr)
        return 2 if isinstance(error, UnsupportedConfig) else 1
    files = len({one.file for one in placed})
    print(
        f"{args.out}: {len(placed)} tensors, {format_bytes(sum(_bytes(one.tensor) for one in placed))} in {files} files"
    )
    return 0
