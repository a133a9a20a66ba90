"""`thalweg bench make-checkpoint`: a checkpoint of random weights in the published layout, so that any engine can be
measured on the same ones.

Weights are scaled as `--load-format dummy` does it: activations stay near 1 and tokens choose their experts about
uniformly. One file at a time is in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file

from thalweg.bench.command import CommandParser, add_flags, command
from thalweg.bench.display import progress_bar
from thalweg.bench.errors import BenchError
from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError, UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.layers.reference import ReferenceLayers
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.quant.files import GPTQ, MODELOPT
from thalweg.quant.scheme import TensorSpec
from thalweg.text import tiktoken
from thalweg.weights.index import INDEX
from thalweg.weights.random import RandomTensor, random_tensors
from thalweg.weights.stream import SINGLE

T = TypeVar("T")
THREADS = 8
PUBLISHED_TYPES = ("bfloat16", "float16", "float32")
COPIED = (  # not all of `hub.TEXTS`: other JSON files tell of the source's weights
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "chat_template.json", "*.jinja", "vocab.json", "merges.txt", tiktoken.FILE, "*.py",
)  # fmt: skip
FLAGS = """
--seed        whole=0   of the random weights
--shard-size  number=5  GB of a file, at most; a file is made in memory
--no-nextn    switch    leave the NextN layers out, which some loaders do not read
--device      device    where the numbers are drawn; default: a GPU where there is one
"""


def published(facts: ModelFacts, nextn: bool) -> list[RandomTensor]:
    """Every tensor of a model as it is published, in the order of the model. nextn: with the NextN layers' tensors.

    Raises CheckpointError for an unknown architecture or a type that no checkpoint is published in, UnsupportedConfig
    for scales that follow from a text.
    """
    if facts.quantization_config.get("activation_scheme") == "static":
        raise UnsupportedConfig(
            "config.json: activation_scheme static needs scales of a calibration, and random weights have none; take"
            " it out"
        )
    if facts.dtype not in PUBLISHED_TYPES:
        types = ", ".join(PUBLISHED_TYPES)
        raise CheckpointError(f"config.json: torch_dtype {facts.dtype!r}; weights are drawn in {types}")
    dtype = getattr(torch, facts.dtype)
    model = catalog.assemble(facts, ReferenceLayers(dtype, torch.device("meta"), published=dtype))
    tensors = random_tensors(model.table(), facts.quantization_config, facts.tied)
    if nextn and facts.nextn:
        tensors += random_tensors(catalog.build_nextn(model).table(), facts.quantization_config, facts.tied)
        layer = f"model.layers.{facts.layers}"  # repeats the main model's embedding and head
        for name, like in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            main = next(tensor for tensor in tensors if tensor.spec.name == f"{like}.weight")
            spec = TensorSpec(f"{layer}.{name}.weight", main.spec.shape, main.spec.dtype)
            tensors.append(RandomTensor(spec, main.spec.name, main.spread, main.centre))
    return tensors


def shards(tensors: Iterable[T], size: Callable[[T], int], most: int) -> list[list[T]]:
    """Consecutive tensors of up to `most` bytes together. size: bytes of one."""
    files: list[list[T]] = [[]]
    total = 0
    for tensor in tensors:
        if files[-1] and total + size(tensor) > most:
            files.append([])
            total = 0
        files[-1].append(tensor)
        total += size(tensor)
    return files


def make(shape: Path, out: Path, seed: int, nextn: bool, shard: int, device: torch.device) -> tuple[int, int, int]:
    """The checkpoint of the model whose config.json is in `shape`, in the folder `out`: its tensors, bytes and files.
    Raises CheckpointError, UnsupportedConfig, OSError.
    """
    tensors = published(read_facts(shape), nextn)
    if out.exists() and any(out.iterdir()):
        raise UnsupportedConfig(f"{out} is not empty: give an empty or a new folder")
    out.mkdir(parents=True, exist_ok=True)
    total, free = sum(tensor.spec.nbytes for tensor in tensors), shutil.disk_usage(out).free
    if total > free:
        sizes = f"{format_bytes(total)}, and {format_bytes(free)} are free"
        raise UnsupportedConfig(f"the checkpoint takes {sizes} at {out}: give another folder")
    for pattern in (*COPIED, MODELOPT, GPTQ):
        for file in shape.glob(pattern):
            shutil.copyfile(file, out / file.name)
    files, names = shards(tensors, lambda tensor: tensor.spec.nbytes, shard), dict[str, str]()
    with ThreadPoolExecutor(THREADS) as pool, progress_bar("writing weights", len(tensors)) as bar:

        def draw(tensor: RandomTensor) -> torch.Tensor:
            weight = tensor.slice((), seed, device).cpu()
            bar.advance()
            return weight

        for number, file_tensors in enumerate(files, 1):
            name = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            keys = [tensor.spec.name for tensor in file_tensors]
            save_file(dict(zip(keys, pool.map(draw, file_tensors), strict=True)), out / name, metadata={"format": "pt"})
            names |= dict.fromkeys(keys, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (out / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return len(tensors), total, len(files)


@command("thalweg bench make-checkpoint")
def main(argv: list[str]) -> int:
    """0: written; 1: an error; 2: wrong flags."""
    text = (
        "Writes a checkpoint of random weights in the published layout: sharded safetensors with their index, FP8"
        " weights with their scales, config.json and the tokenizer of the shape's folder."
    )
    usage = "thalweg bench make-checkpoint SHAPE OUT [--seed N]"
    parser = CommandParser(prog="thalweg bench make-checkpoint", description=text, usage=usage)
    parser.add_argument("shape", type=Path, metavar="SHAPE", help="folder with the config.json of the model")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that the checkpoint is written to")
    add_flags(parser, "", FLAGS, device=("cpu", "cuda"))
    args = parser.parse_args(argv)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        made = make(args.shape, args.out, args.seed, not args.no_nextn, int(args.shard_size * 1e9), device)
    except OSError as error:
        raise BenchError(str(error)) from error
    tensors, total, files = made
    print(f"{args.out}: {tensors} tensors, {format_bytes(total)} in {files} files")
    return 0
