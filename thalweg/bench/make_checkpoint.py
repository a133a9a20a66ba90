"""`thalweg bench make-checkpoint`: a checkpoint of random weights in the published layout, so that any engine is
measured on the same ones.

Weights are scaled as `--load-format dummy` does it: activations stay near 1 and tokens choose their experts about
uniformly. The files are written piece by piece; nothing larger than a few pieces is ever in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from thalweg.bench.published import published
from thalweg.config.args import OptionsParser
from thalweg.core.errors import ThalwegError, UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.models.catalog import read_facts
from thalweg.weights.random import RandomTensor
from thalweg.weights.stream import DTYPES, INDEX, SINGLE

PIECE = 1 << 23  # elements drawn and written at a time
THREADS = 8
COPIED = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.json", "merges.txt")  # fmt: skip
SPELLED = {dtype: spelling for spelling, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor at byte `offset` of a file."""

    tensor: RandomTensor
    file: str
    offset: int


def shards(tensors: Iterable[RandomTensor], most: int) -> list[list[RandomTensor]]:
    """Consecutive tensors of up to `most` bytes together."""
    made: list[list[RandomTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if made[-1] and held + tensor.spec.nbytes > most:
            made.append([])
            held = 0
        made[-1].append(tensor)
        held += tensor.spec.nbytes
    return made


def lay_out(tensors: Sequence[RandomTensor], folder: Path, most: int) -> list[Placed]:
    """Makes the files with their headers, at their full size, and the index; says where each tensor goes."""
    files, placed, total = shards(tensors, most), list[Placed](), sum((tensor.spec.nbytes for tensor in tensors))
    for number, shard in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        starts = []
        for tensor in shard:
            ends = [at, at + tensor.spec.nbytes]
            header[tensor.spec.name] = {
                "dtype": SPELLED[tensor.spec.dtype],
                "shape": list(tensor.spec.shape),
                "data_offsets": ends,
            }
            starts.append(at)
            at = ends[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
        placed += (Placed(one, name, 8 + len(text) + start) for one, start in zip(shard, starts, strict=True))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {one.tensor.spec.name: one.file for one in placed}}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return placed


def _pieces(placed: Iterable[Placed]) -> Iterator[tuple[Placed, range]]:
    """Rows of about PIECE elements together; a vector is one row."""
    for one in placed:
        shape = one.tensor.spec.shape
        rows, columns = (shape[0], shape[1]) if len(shape) > 1 else (1, shape[0])
        step = max(PIECE // columns, 1)
        for first in range(0, rows, step):
            yield one, range(first, min(first + step, rows))


def write(placed: Sequence[Placed], folder: Path, seed: int, device: torch.device, shown: bool) -> None:
    """Fills the files that `lay_out` made; shows a bar of the bytes. Raises OSError."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    total = sum(one.tensor.spec.nbytes for one in placed)
    with ExitStack() as stack:
        bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), disable=not shown))
        task = bar.add_task("writing weights", total=total)
        files = {name: os.open(folder / name, os.O_WRONLY) for name in dict.fromkeys(one.file for one in placed)}
        for file in files.values():
            stack.callback(os.close, file)
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))

        def fill(one: Placed, rows: range) -> int:
            spec = one.tensor.spec
            take = (slice(rows.start, rows.stop),) if len(spec.shape) > 1 else ()
            drawn = one.tensor.slice(take, seed, device).view(-1).view(torch.uint8).cpu().numpy().data
            row_bytes = spec.nbytes // (spec.shape[0] if take else 1)
            at, done = one.offset + rows.start * row_bytes, 0
            while done < len(drawn):
                done += os.pwrite(files[one.file], drawn[done:], at + done)
            return done

        work: list[Future[int]] = [pool.submit(fill, *piece) for piece in _pieces(placed)]
        for done in as_completed(work):
            bar.update(task, advance=done.result())


def make(shape: Path, out: Path, seed: int, nextn: bool, shard: int, device: torch.device, shown: bool) -> list[Placed]:
    """The checkpoint of the model whose config.json lies in `shape`, in the folder `out`. Raises CheckpointError,
    UnsupportedConfig, OSError.
    """
    tensors = published(read_facts(shape), nextn)
    if out.exists() and any(out.iterdir()):
        raise UnsupportedConfig(f"{out} is not empty: give a folder that is, or does not exist")
    out.mkdir(parents=True, exist_ok=True)
    total, free = sum((tensor.spec.nbytes for tensor in tensors)), shutil.disk_usage(out).free
    if total > free:
        raise UnsupportedConfig(
            f"the checkpoint takes {format_bytes(total)}, and {format_bytes(free)} are free at {out}: give another"
            " folder"
        )
    for pattern in COPIED:
        for file in shape.glob(pattern):
            shutil.copyfile(file, out / file.name)
    placed = lay_out(tensors, out, shard)
    write(placed, out, seed, device, shown)
    return placed


def _parser() -> OptionsParser:
    parser = OptionsParser(
        prog="thalweg bench make-checkpoint",
        description=(
            "Writes a checkpoint of random weights in the published layout: sharded safetensors with their index, FP8"
            " weights with their scales, config.json and the tokenizer of the shape's folder."
        ),
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
        f"{args.out}: {len(placed)} tensors, {format_bytes(sum(one.tensor.spec.nbytes for one in placed))} in {files}"
        " files"
    )
    return 0
