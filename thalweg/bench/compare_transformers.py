"""`thalweg bench compare-transformers`: the same prompts through Thalweg and through transformers' `generate`, in one
process.

Both have the same weights (FP8 blocks decoded to float32), dtype, threads and lengths, both are warm, and they take
turns, so that a busy moment of the machine hits both. transformers runs with every cache it has; the fastest is what is
compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from thalweg.bench.in_process import (
    Tokens,
    configuration,
    fits,
    folder_name,
    middle,
    positive,
    random_batch,
    room_for,
    start,
    time_batch,
)
from thalweg.bench.results import provenance, write
from thalweg.bench.usage import status
from thalweg.config.args import OptionsParser, options_parser, parse_options
from thalweg.core.errors import CheckpointError, UnsupportedConfig
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolved import Resolved

CACHES = ("dynamic", "static")
BLOCK = 128
SCALE = "_scale_inv"
CANNOT = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What transformers raises where a model cannot use a kind of cache; the reason goes into the result."""


class Generator(Protocol):
    """Completes a batch of prompts of one length, greedily, to exactly `length` tokens each; None where it cannot."""

    def run(self, prompts: Sequence[Tokens], length: int) -> list[Tokens]: ...


class Generates(Protocol):
    """What is used of a transformers model."""

    def generate(self, ids_BT: Tensor, **options: object) -> Tensor:
        """[B, T + new]."""


@dataclass(slots=True)
class Ours:
    """Thalweg."""

    engine: LocalEngine

    def run(self, prompts: Sequence[Tokens], length: int) -> list[Tokens]:
        return time_batch(self.engine, prompts, length).outputs


@dataclass(slots=True)
class Theirs:
    """transformers with one kind of cache."""

    model: Generates
    cache: str

    @torch.inference_mode()
    def run(self, prompts: Sequence[Tokens], length: int) -> list[Tokens]:
        ids = torch.tensor(list(prompts))
        kind = {} if self.cache == "dynamic" else {"cache_implementation": self.cache}
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            **kind,
        )
        tokens: list[Tokens] = found[:, ids.shape[1] :].tolist()
        return tokens


@dataclass(slots=True)
class Runs:
    """One contestant at one batch size: seconds of each run, its tokens, or why it could not."""

    seconds: list[float] = field(default_factory=list)
    outputs: list[Tokens] = field(default_factory=list)
    cannot: str = ""


def decode_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """float32 tensors under their own names, with FP8 weights times the scales of their 128 × 128 blocks."""
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        value = tensor.float()
        if (scale := tensors.get(name + SCALE)) is not None:
            rows = scale.repeat_interleave(BLOCK, 0)[: value.shape[0]]
            value = value * rows.repeat_interleave(BLOCK, 1)[:, : value.shape[1]]
        plain[name] = value.contiguous()
    return plain


def load_transformers(folder: Path) -> Generates:
    """The checkpoint in transformers, float32. Its NextN layers stay out: transformers has none.

    Raises UnsupportedConfig without transformers, CheckpointError where its own reading leaves a tensor over or short.
    """
    try:
        library: Any = import_module("transformers")
    except ImportError as error:
        raise UnsupportedConfig("this comparison needs transformers: pip install 'thalweg[test]'") from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    extra = tuple(
        f"model.layers.{config['num_hidden_layers'] + i}." for i in range(config.get("num_nextn_predict_layers", 0))
    )
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    with tempfile.TemporaryDirectory() as place:
        plain = {name: tensor for name, tensor in decode_fp8(tensors).items() if not (extra and name.startswith(extra))}
        save_file(plain, Path(place) / "model.safetensors", metadata={"format": "pt"})
        (Path(place) / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}), encoding="utf-8")
        model, info = library.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, output_loading_info=True)
    wrong = {kind: sorted(names) for kind, names in info.items() if names}
    if wrong:
        raise CheckpointError(f"transformers cannot read {folder.name} completely: {wrong}")
    found: Generates = model.eval()
    return found


def compete(contestants: dict[str, Generator], prompts: Sequence[Tokens], length: int, rounds: int) -> dict[str, Runs]:
    """A warm-up each, then `rounds` rounds in alternating order."""
    runs = {name: Runs() for name in contestants}
    for name, contestant in contestants.items():
        try:
            runs[name].outputs = contestant.run(prompts, length)
        except CANNOT as error:
            if not isinstance(contestant, Theirs):
                raise
            runs[name].cannot = f"{type(error).__name__}: {error}"[:300]
    able = [name for name in contestants if not runs[name].cannot]
    for turn in range(rounds):
        for name in able if turn % 2 == 0 else reversed(able):
            begin = time.perf_counter()
            contestants[name].run(prompts, length)
            runs[name].seconds.append(time.perf_counter() - begin)
    return runs


def agreement(ours: Sequence[Tokens], theirs: Sequence[Tokens]) -> float:
    """Share of positions up to which both write the same tokens; after a first difference two texts are different
    questions.
    """
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(a)
        same += next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
    return same / total if total else 1.0


def judge(batch: int, length: int, runs: dict[str, Runs]) -> dict[str, object]:
    """Median tokens a second of each, and Thalweg's over the fastest other's. Raises UnsupportedConfig when no other
    ran.
    """
    rates = {name: batch * length / middle(r.seconds) for name, r in runs.items() if r.seconds}
    others = {name: rate for name, rate in rates.items() if name != "thalweg"}
    if not others:
        raise UnsupportedConfig(
            "transformers could run this checkpoint with no cache: " + str({n: r.cannot for n, r in runs.items()})
        )
    fastest = max(others, key=lambda name: others[name])
    return {
        "batch_size": batch,
        "output_tokens_per_s": rates,
        "seconds": {name: r.seconds for name, r in runs.items()},
        "fastest_other": fastest,
        "ratio": rates["thalweg"] / rates[fastest],
        "ratio_of_best_runs": min(runs[fastest].seconds) / min(runs["thalweg"].seconds),
        "same_tokens": {name: agreement(runs["thalweg"].outputs, runs[name].outputs) for name in others},
        "cannot": {name: r.cannot for name, r in runs.items() if r.cannot},
    }


def _parser() -> OptionsParser:
    parser = options_parser(
        "thalweg bench compare-transformers",
        "Tokens a second of Thalweg and of the fastest of transformers' generate, on the same prompts in the same run.",
        only=("model", "load", "memory", "schedule"),
    )
    add = parser.add_argument_group("Comparison").add_argument
    add(
        "--batch-size",
        type=positive,
        nargs="+",
        default=[1, 32],
        metavar="N",
        help="sequences at a time (default: 1 32)",
    )
    add("--input-len", type=positive, default=128, metavar="N", help="tokens of each prompt (default: 128)")
    add("--output-len", type=positive, default=128, metavar="N", help="tokens to generate (default: 128)")
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each, in alternating order (default: 3)")
    add("--bench-seed", type=int, default=1, metavar="N", help="of the random tokens (default: 1)")
    add("--output-file", default="", metavar="FILE", help="write the result as JSON")
    return parser


def table(results: Sequence[dict[str, object]]) -> Table:
    shown = Table(title="output tokens a second", title_justify="left")
    for head in ("batch", "thalweg", "transformers", "its cache", "ratio", "same tokens"):
        shown.add_column(head, justify="right")
    for r in results:
        rates, same, fastest = r["output_tokens_per_s"], r["same_tokens"], str(r["fastest_other"])
        assert isinstance(rates, dict) and isinstance(same, dict)
        cache, ratio = fastest.removeprefix("transformers "), f"{r['ratio']:.2f}"
        shown.add_row(
            str(r["batch_size"]),
            f"{rates['thalweg']:.1f}",
            f"{rates[fastest]:.1f}",
            cache,
            ratio,
            f"{same[fastest]:.1%}",
        )
    return shown


def run(argv: list[str]) -> int:
    """Measures and prints; Ctrl-C keeps the batch sizes that are done. The exit status. Raises ThalwegError or
    ResultError.
    """
    parsed = parse_options(_parser(), argv)
    args: argparse.Namespace = parsed.args
    room = room_for(parsed.options, max(args.batch_size), args.input_len, args.output_len)
    resolved, engine = start(room)
    if resolved.engine.dtype != "float32":
        raise UnsupportedConfig(
            f"the comparison runs in float32 on both sides, and --dtype is {resolved.engine.dtype}: say --dtype float32"
        )
    fits(engine, args.input_len, args.output_len)
    model, rng = load_transformers(resolved.path), Random(args.bench_seed)
    results: list[dict[str, object]] = []
    console, ended = Console(stderr=True), ""
    try:
        with Progress(console=console, disable=not console.is_terminal) as bar:
            for batch in bar.track(args.batch_size, description="batch sizes"):
                prompts = random_batch(resolved, batch, args.input_len, rng)
                contestants: dict[str, Generator] = {"thalweg": Ours(engine)}
                contestants |= {f"transformers {cache}": Theirs(model, cache) for cache in CACHES}
                runs = compete(contestants, prompts, args.output_len, args.rounds)
                results.append(judge(batch, args.output_len, runs))
    except KeyboardInterrupt:
        ended = "Ctrl-C"
        print("PARTIAL: Ctrl-C; the batch sizes that were done are told and written", file=sys.stderr)
    if results:
        _keep(results, ended, args, resolved, argv)
    return 130 if ended else 0


def _keep(
    results: list[dict[str, object]], ended: str, args: argparse.Namespace, resolved: Resolved, argv: list[str]
) -> None:
    """Prints and writes them. Raises ResultError."""
    Console().print(table(results))
    if args.output_file:
        lengths = {
            "input_len": args.input_len,
            "output_len": args.output_len,
            "rounds": args.rounds,
            "seed": args.bench_seed,
        }
        load = {"checkpoint": folder_name(resolved.path), "threads": torch.get_num_threads(), **lengths}
        told = provenance("bench compare-transformers", argv, configuration(resolved))
        early = {"partial": bool(ended), "ended": ended}
        write(Path(args.output_file), {"load": load, "results": results, **early, **told})


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, 1: it could not run, 2: it was asked for wrongly, 130: Ctrl-C, what was measured is told and written."""
    return status("thalweg bench compare-transformers", run, argv)
