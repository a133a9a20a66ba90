"""`thalweg bench compare-transformers`: the same prompts through Thalweg and through transformers' `generate`, in one
process.

Both have the same weights (FP8 blocks decoded to float32), dtype, threads and lengths, both are warm, and they
alternate, so that other work on the machine slows both. transformers runs with each of its caches; the fastest counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from thalweg.bench.command import ENGINE_FLAGS, OUTPUT, PartialRun, command, parse_engine_flags
from thalweg.bench.display import progress_bar, show
from thalweg.bench.in_process import (
    BENCH_SEED,
    Lengths,
    Tokens,
    configuration,
    random_batch,
    reserve,
    start,
    time_batch,
)
from thalweg.bench.results import save
from thalweg.bench.statistics import common_length, median
from thalweg.core.errors import CheckpointError, UnsupportedConfig
from thalweg.launch.report import make_table

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


@torch.inference_mode()
def generate_with_transformers(model: Any, cache: str, prompts: Sequence[Tokens], length: int) -> list[Tokens]:
    """Prompts of one length, greedily continued by `length` tokens."""
    ids = torch.tensor(list(prompts))
    kind = {} if cache == "dynamic" else {"cache_implementation": cache}
    options = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0, **kind}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    tokens: list[Tokens] = written[:, ids.shape[1] :].tolist()
    return tokens


def decode_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """float32 tensors under their own names; FP8 weights are multiplied by the scales of their 128 × 128 blocks."""
    plain = {name: tensor.float() for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name, weight in plain.items():
        if (scale := tensors.get(name + SCALE)) is not None:
            blocks = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            weight *= blocks[: weight.shape[0], : weight.shape[1]]
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
    first, tensors = config["num_hidden_layers"], dict[str, Tensor]()
    nextn = tuple(f"model.layers.{first + i}." for i in range(config.get("num_nextn_predict_layers", 0)))
    for file in folder.glob("*.safetensors"):
        tensors |= {name: tensor for name, tensor in load_file(file).items() if not name.startswith(nextn)}
    model, info = getattr(library, config["architectures"][0]).from_pretrained(
        None,
        config=library.AutoConfig.for_model(**config),
        state_dict=decode_fp8(tensors),
        dtype=torch.float32,
        output_loading_info=True,
    )
    if wrong := {kind: sorted(names) for kind, names in info.items() if names}:
        raise CheckpointError(f"transformers cannot read {folder.name} completely: {wrong}")
    model.generation_config.eos_token_id = None  # an end token is a token like any other, as for our engine here
    return model.eval()


def compete(engines: Mapping[str, Generate], prompts: Sequence[Tokens], length: int, rounds: int) -> Row:
    """A warm-up each, then `rounds` rounds in alternating order: seconds and outputs of each that can run, and of the
    others the reason why not. Raises UnsupportedConfig where only Thalweg can.
    """
    seconds, outputs, cannot = dict[str, list[float]](), dict[str, list[Tokens]](), dict[str, str]()
    for name, generate in engines.items():
        try:
            outputs[name], seconds[name] = generate(prompts, length), []
        except CANNOT as error:
            if name == OURS:
                raise
            cannot[name] = f"{type(error).__name__}: {error}"[:300]
    if len(outputs) == 1:
        raise UnsupportedConfig(f"transformers can run this checkpoint with none of its caches: {cannot}")
    for turn in range(rounds):
        for name in outputs if turn % 2 == 0 else reversed(outputs):
            begin = time.perf_counter()
            engines[name](prompts, length)
            seconds[name].append(time.perf_counter() - begin)
    return judge(len(prompts) * length, seconds, outputs) | {"cannot": cannot}


def judge(tokens: int, seconds: Mapping[str, list[float]], outputs: Mapping[str, list[Tokens]]) -> Row:
    """Median tokens a second of each, and Thalweg's over the fastest other's."""
    rates = {name: tokens / median(runs) for name, runs in seconds.items()}
    fastest = max((name for name in rates if name != OURS), key=lambda name: rates[name])
    return {
        "output_tokens_per_s": rates,
        "seconds": seconds,
        "fastest_other": fastest,
        "ratio": rates[OURS] / rates[fastest],
        "same_tokens": {name: agreement(outputs[OURS], outputs[name]) for name in rates if name != OURS},
    }


def agreement(ours: Sequence[Tokens], theirs: Sequence[Tokens]) -> float:
    """Share of positions before the first difference of each text: behind it the questions differ."""
    return sum(map(common_length, ours, theirs)) / max(sum(map(len, ours)), 1)


COLUMNS = {
    "batch": "{batch_size}", "thalweg": "{output_tokens_per_s[thalweg]:.1f}",
    "transformers": lambda row: f"{row['output_tokens_per_s'][row['fastest_other']]:.1f}",
    "its cache": lambda row: str(row["fastest_other"]).removeprefix("transformers "), "ratio": "{ratio:.2f}",
    "same tokens": lambda row: f"{row['same_tokens'][row['fastest_other']]:.1%}",
}  # fmt: skip


@command("thalweg bench compare-transformers")
def main(argv: list[str]) -> int:
    """0: done; 1: an error; 2: wrong flags; 130: Ctrl-C. Results are printed and written."""
    text = (
        "Tokens a second of Thalweg and of the fastest of transformers' generate, on the same prompts in the same run."
    )
    name, flags = "thalweg bench compare-transformers", {"Comparison": FLAGS}
    args, options = parse_engine_flags(argv, name, text, flags, ENGINE_FLAGS[:5])  # one process has all threads
    resolved, engine = start(reserve(options, max(args.batch_size), args.input_len, args.output_len))
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
            rows.append({"batch_size": batch, **compete(engines, prompts, args.output_len, args.rounds)})
            bar.advance()
    show(make_table("output tokens a second", COLUMNS, rows))
    if rows:
        load = {"checkpoint": resolved.path.resolve().name, "threads": torch.get_num_threads(), "seed": args.bench_seed}
        load |= {name: getattr(args, name) for name in ("input_len", "output_len", "rounds")}
        result = {"load": load, "results": rows, **run.as_json()}
        save(args.output_file, "bench compare-transformers", argv, configuration(resolved), result)
    return run.finish()
