"""`thalweg quantize MODEL OUT --format F`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from thalweg.bench.command import CommandParser, add_flags, command
from thalweg.bench.display import markdown_table, progress_bar
from thalweg.bench.errors import BenchError
from thalweg.config.bundled import find_bundled
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.launch.hub import fetch_weights, locate
from thalweg.models.catalog import read_facts
from thalweg.quantize.calibrate import Calibration
from thalweg.quantize.convert import Result, convert
from thalweg.quantize.jobs import QuantizeRequest
from thalweg.quantize.targets import TARGETS
from thalweg.text.tokenizer import Tokenizer

CALIBRATION_TOKENS = 16384
FLAGS = """
--modules     modules   what is quantized: the routed experts, or all linear layers; default: the experts, where
                        there are some
--ignore      text...   modules that are not quantized: names, parts of names between dots, or `re:` and an expression
                        that matches from the start of the name
--group-size  groups    weights that share a scale in int4; default: 128
--calibrate   path      a text: linear layers are rounded by what they compute on it (GPTQ), and w4afp8 gets scales of
                        its experts' inputs
--calibration-tokens  count  of the text; default: 16384
--shard-size  positive=5  GB of a file, at most
--threads     count     weights that are rounded at a time; default: one a CPU core, 8 at most
--device      device=cpu  where they are rounded
"""
EPILOG = """\
formats:
{formats}

The source may be in any format that Thalweg serves. Weights are rounded to nearest, one at a time, so memory does not
grow with the model. A run that was interrupted goes on when it is started again with the same flags.

examples:
  thalweg quantize models/tiny tiny-int4 --format int4
  thalweg quantize deepseek-ai/DeepSeek-V3 v3-w4afp8 --format w4afp8
  thalweg quantize Qwen/Qwen2.5-72B-Instruct qwen-int4 --format int4 --ignore 're:.*down_proj'"""


def report(result: Result) -> list[str]:
    """A row for each kind of weight: its error, or, calibrated, that of what it computes."""
    rows = [
        (where, error.tensors, how, format_bytes(error.nbytes), f"{error.relative:.2%}")
        for (where, how), error in sorted(result.errors.items())
    ]
    return markdown_table(("weights", "tensors", "format", "bytes", "error"), rows) if rows else []


@command("thalweg quantize")
def main(argv: list[str]) -> int:
    """0: written; 1: an error; 2: wrong flags."""
    parser = CommandParser(
        prog="thalweg quantize",
        description="Writes a checkpoint in another published format, which other engines and libraries read, too.",
        usage="thalweg quantize MODEL OUT --format FORMAT [--flag value ...]",
        epilog=EPILOG.format(formats="\n".join(f"  {name:<8}{target.summary}" for name, target in TARGETS.items())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", type=find_bundled, metavar="MODEL", help="folder of a checkpoint, or org/name on the hub"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that is written")
    parser.add_argument("--format", required=True, choices=TARGETS, help="see below")
    sizes = {"modules": ("experts", "linear"), "groups": ("32", "64", "128"), "device": ("cpu", "cuda")}
    add_flags(parser, "", FLAGS, **sizes)
    args = parser.parse_args(argv)
    checkpoint = locate(args.model)
    facts = read_facts(checkpoint.folder)
    fetch_weights(checkpoint)
    group = int(args.group_size) if args.group_size else None
    request = QuantizeRequest(args.format, args.modules or None, group, args.ignore)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedConfig("--device cuda: there is no CUDA device here")
    if args.calibration_tokens and args.calibrate is None:
        raise UnsupportedConfig("--calibration-tokens: without --calibrate TEXT nothing is calibrated")
    device = torch.device(args.device)
    threads = args.threads or min(os.cpu_count() or 1, 8)
    try:
        text = None if args.calibrate is None else args.calibrate.read_text(encoding="utf-8")
        calibration = None
        if text is not None:
            tokenizer = Tokenizer(checkpoint.folder)
            tokens = args.calibration_tokens or CALIBRATION_TOKENS
            calibration = Calibration.of_text(text, tokenizer.encode, tokens, facts.context)
        with progress_bar("calibrating layers", 0, text is not None) as layers, progress_bar("writing", 0) as bar:
            shard = int(args.shard_size * 1e9)
            result = convert(
                checkpoint.folder, args.out, request, shard, device, threads, bar.reach, calibration, layers.reach
            )
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(str(error)) from error
    kept = f", of which a former run wrote {result.kept}" if result.kept else ""
    print(f"{args.out}: {result.tensors} tensors, {format_bytes(result.nbytes)} in {result.files} files{kept}")
    if result.left_out:
        print(f"left out: {result.left_out} scales of activations; --calibrate TEXT makes those of w4afp8 anew")
    for line in report(result):
        print(line)
    return 0
