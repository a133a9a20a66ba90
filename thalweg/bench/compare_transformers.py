"""`thalweg bench compare-transformers`: the same prompts through Thalweg and through transformers' `generate`, in one
process.

Both have the same weights (FP8 blocks decoded to float32), dtype, threads and lengths, both are warm, and they
alternate, so that other work on the machine slows both. transformers runs with each of its caches; the fastest counts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from thalweg.bench.command import OUTPUT, PartialRun, add_flags, exit_status
from thalweg.bench.display import make_table, progress_bar, show
from thalweg.bench.in_process import (
    BENCH_SEED,
    ENGINE_FLAGS,
    Lengths,
    Tokens,
    configuration,
    random_batch,
    reserve,
    start,
    time_batch,
)
from thalweg.bench.results import provenance, write
from thalweg.bench.statistics import median
from thalweg.config.args import options_parser, parse_options
from thalweg.core.errors import CheckpointError, UnsupportedConfig

CACHES = ("dynamic", "static")
OURS = "thalweg"
BLOCK = 128
SCALE = "_scale_inv"
# what transformers raises where a model cannot use a kind of cache; the reason goes into the result
CANNOT = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
FLAGS = f"""
--batch-size  count...=1 32  sequences at a time
--input-len   count=128      tokens of each prompt
--output-len  count=128      tokens to generate
--rounds      count=3        runs of each, in alternating order
{BENCH_SEED}
{OUTPUT}
"""

Generate = Callable[[Sequence[Tokens], int], list[Tokens]]  # prompts of one length, tokens to write; greedy
Row = dict[str, Any]


@dataclass(slots=True)
class GenerateRuns:
    """One engine at one batch size."""

    seconds: list[float] = field(default_factory=list)
    outputs: list[Tokens] = field(default_factory=list)
    cannot: str = ""  # why it could not run


@torch.inference_mode()
def generate_with_transformers(model: Any, cache: str, prompts: Sequence[Tokens], length: int) -> list[Tokens]:
    ids = torch.tensor(list(prompts))
    kind = {} if cache == "dynamic" else {"cache_implementation": cache}
    options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0, **kind}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    tokens: list[Tokens] = written[:, ids.shape[1] :].tolist()
    return tokens


def decode_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """float32 tensors under their own names; FP8 weights are multiplied by the scales of their 128 × 128 blocks."""
    plain = {}
    for name, tensor in tensors.items():
        if not name.endswith(SCALE):
            value = tensor.float()
            if (scale := tensors.get(name + SCALE)) is not None:
                rows = scale.repeat_interleave(BLOCK, 0)[: value.shape[0]]
                value = value * rows.repeat_interleave(BLOCK, 1)[:, : value.shape[1]]
            plain[name] = value.contiguous()
    return plain


def load_transformers(folder: Path) -> Any:
    """The checkpoint in transformers, float32, without NextN layers, which transformers does not have.

    Raises UnsupportedConfig without transformers, CheckpointError where it does not read the checkpoint completely.
    """
    try:
        library: Any = import_module("transformers")
    except ImportError as error:
        raise UnsupportedConfig("this comparison needs transformers: pip install 'thalweg[test]'") from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    layers, nextn = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    left_out = tuple(f"model.layers.{layers + i}." for i in range(nextn))
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    with tempfile.TemporaryDirectory() as name:
        plain = {name: tensor for name, tensor in decode_fp8(tensors).items() if not name.startswith(left_out)}
        save_file(plain, Path(name) / "model.safetensors", metadata={"format": "pt"})
        (Path(name) / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}), encoding="utf-8")
        model, info = library.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
    wrong = {kind: sorted(names) for kind, names in info.items() if names}
    if wrong:
        raise CheckpointError(f"transformers cannot read {folder.name} completely: {wrong}")
    return model.eval()


def compete(
    engines: Mapping[str, Generate], prompts: Sequence[Tokens], length: int, rounds: int
) -> dict[str, GenerateRuns]:
    """A warm-up each, then `rounds` rounds in alternating order."""
    runs = {name: GenerateRuns() for name in engines}
    for name, generate in engines.items():
        try:
            runs[name].outputs = generate(prompts, length)
        except CANNOT as error:
            if name == OURS:
                raise
            runs[name].cannot = f"{type(error).__name__}: {error}"[:300]
    able = [name for name in engines if not runs[name].cannot]
    for turn in range(rounds):
        for name in able if turn % 2 == 0 else reversed(able):
            begin = time.perf_counter()
            engines[name](prompts, length)
            runs[name].seconds.append(time.perf_counter() - begin)
    return runs


def agreement(ours: Sequence[Tokens], theirs: Sequence[Tokens]) -> float:
    """Share of positions before the first difference of each text: behind it the questions differ."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(a)
        same += next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
    return same / total if total else 1.0


def judge(batch: int, length: int, runs: dict[str, GenerateRuns]) -> Row:
    """Median tokens a second of each, and Thalweg's over the fastest other's. Raises UnsupportedConfig without
    another.
    """
    rates = {name: batch * length / median(run.seconds) for name, run in runs.items() if run.seconds}
    others = {name: rate for name, rate in rates.items() if name != OURS}
    cannot = {name: run.cannot for name, run in runs.items() if run.cannot}
    if not others:
        raise UnsupportedConfig(f"transformers can run this checkpoint with none of its caches: {cannot}")
    fastest = max(others, key=lambda name: others[name])
    return {
        "batch_size": batch,
        "output_tokens_per_s": rates,
        "seconds": {name: run.seconds for name, run in runs.items()},
        "fastest_other": fastest,
        "ratio": rates[OURS] / rates[fastest],
        "ratio_of_best_runs": min(runs[fastest].seconds) / min(runs[OURS].seconds),
        "same_tokens": {name: agreement(runs[OURS].outputs, runs[name].outputs) for name in others},
        "cannot": cannot,
    }


COLUMNS = {
    "batch": "{batch_size}", "thalweg": "{output_tokens_per_s[thalweg]:.1f}",
    "transformers": lambda row: f"{row['output_tokens_per_s'][row['fastest_other']]:.1f}",
    "its cache": lambda row: str(row["fastest_other"]).removeprefix("transformers "), "ratio": "{ratio:.2f}",
    "same tokens": lambda row: f"{row['same_tokens'][row['fastest_other']]:.1%}",
}  # fmt: skip


def _run(argv: list[str]) -> int:
    """Measures and prints; Ctrl-C keeps the finished batch sizes. Raises ThalwegError."""
    text = (
        "Tokens a second of Thalweg and of the fastest of transformers' generate, on the same prompts in the same run."
    )
    parser = options_parser("thalweg bench compare-transformers", text, only=ENGINE_FLAGS[:4])
    add_flags(parser, "Comparison", FLAGS)
    parsed = parse_options(parser, argv)
    args: Any = parsed.args
    resolved, engine = start(reserve(parsed.options, max(args.batch_size), args.input_len, args.output_len))
    if (dtype := resolved.engine.dtype) != "float32":
        raise UnsupportedConfig(
            f"the comparison runs in float32 on both sides, and --dtype is {dtype}: use --dtype float32"
        )
    Lengths(args.input_len, args.output_len).check(engine.context)
    model, rng, rows = load_transformers(resolved.path), Random(args.bench_seed), list[Row]()
    engines: dict[str, Generate] = {OURS: lambda prompts, length: time_batch(engine, prompts, length).outputs}
    engines |= {f"transformers {cache}": partial(generate_with_transformers, model, cache) for cache in CACHES}
    with PartialRun() as run, progress_bar("batch sizes", len(args.batch_size)) as bar:
        for batch in args.batch_size:
            prompts = random_batch(resolved, batch, args.input_len, rng)
            rows.append(judge(batch, args.output_len, compete(engines, prompts, args.output_len, args.rounds)))
            bar.advance()
    show(make_table("output tokens a second", COLUMNS, rows))
    if args.output_file and rows:
        load = {"checkpoint": resolved.path.resolve().name, "threads": torch.get_num_threads(), "seed": args.bench_seed}
        load |= {name: getattr(args, name) for name in ("input_len", "output_len", "rounds")}
        source = provenance("bench compare-transformers", argv, configuration(resolved))
        write(Path(args.output_file), {"load": load, "results": rows, **run.as_json(), **source})
    return run.finish()


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: an error; 2: wrong flags; 130: Ctrl-C. Results are printed and written."""
    return exit_status("thalweg bench compare-transformers", _run, argv)
