"""One model on several GPUs: cells, each a command of its own with a result of its own, and how they did.

    python benchmarks/gpu/several.py --models FOLDER --out benchmarks/gpu/h200x4 [--cells qwen-tp4 v3-tp4 ...]
    python benchmarks/gpu/several.py --out benchmarks/gpu/h200x4 --table
    python benchmarks/gpu/several.py --models FOLDER --out benchmarks/gpu/h100x4 --layers 20

--models has folders of true shapes (qwen2.5-72b, deepseek-v3, deepseek-v32-slim: config.json and a tokenizer); weights
are random. A cell whose result is there does not run again, so the same command goes on where it ended. A cell that
does not end in time, or fails, leaves the end of its output in NAME.failed.txt and is tried again by the next command.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COMMON = "--load-format dummy --repeat 2"
DP4 = "--tp-size 4 --dp-size 4 --enable-dp-attention --ep-size 4"
FP8_CHANNEL = {  # compressed-tensors with a scale for each output channel, and activations quantized as they come
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
            }
        },
    }
}
LAYERS = 45  # of DeepSeek-V3: what four H200 hold in FP8
WHOLE = {  # all layers, experts in 4 bits and the rest in FP8, as `thalweg quantize --format w4afp8` writes it
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "w4afp8", "group_size": 128, "weight_block_size": [128, 128]},
}
FIRST = {"num_hidden_layers": 11}  # of DeepSeek-V3: what one H200 holds
PROMPT = "--batch-size 1 --input-len 32768 131072 --output-len 2 --context-length 131200 --chunked-prefill-size 16384"
LONG = "--batch-size 8 32 --input-len 32768 --output-len 64 --context-length 32896 --chunked-prefill-size 16384"


class Goal(NamedTuple):
    """How near to the limit a batch size is to come, as limit / measured: a decode step, or the first token."""

    batch: int
    decode: float = 0.0
    prefill: float = 0.0


class Cell(NamedTuple):
    model: str  # folder; "" of a command without a model
    flags: str
    changes: Mapping[str, Any] = {}  # of config.json
    goals: tuple[Goal, ...] = ()
    command: str = "bench one-batch"
    lengths: str = "--context-length 4096 --input-len 1024 --chunked-prefill-size 8192"


def drafts(count: int) -> str:
    steps = f"--speculative-num-steps {count} --speculative-num-draft-tokens {count + 1} --speculative-eagle-topk 1"
    return f"--speculative-algorithm NEXTN {steps} --speculative-simulate-accept-length 2.5"


QWEN, V3, V32 = "qwen2.5-72b", "deepseek-v3", "deepseek-v32-slim"
CELLS = {
    "collectives": Cell("", "--tp-size 4", command="bench collectives"),
    "qwen-tp4": Cell(
        QWEN, "--tp-size 4 --batch-size 1 64 --output-len 64", goals=(Goal(1, 0.90, 0.75), Goal(64, 0.84))
    ),
    "qwen-tp2": Cell(QWEN, "--tp-size 2 --batch-size 1 64 --output-len 64"),
    "qwen-fp8-1": Cell(QWEN, "--batch-size 1 64 --output-len 64", FP8_CHANNEL),
    "qwen-fp8-tp2": Cell(QWEN, "--tp-size 2 --batch-size 1 64 --output-len 64", FP8_CHANNEL),
    "qwen-fp8-tp4": Cell(QWEN, "--tp-size 4 --batch-size 1 64 --output-len 64", FP8_CHANNEL),
    "v3-tp4": Cell(V3, "--tp-size 4 --batch-size 1 64 --output-len 64", goals=(Goal(1, 0.50), Goal(64, 0.86))),
    "v3-dp4": Cell(V3, f"{DP4} --batch-size 256 --output-len 64", goals=(Goal(256, 0.80),)),
    "v3-tp4-nextn2": Cell(V3, f"--tp-size 4 --batch-size 1 --output-len 128 {drafts(2)}"),
    "v3-tp4-nextn3": Cell(V3, f"--tp-size 4 --batch-size 1 --output-len 128 {drafts(3)}"),
    "v3-pp2-tp2": Cell(V3, "--pp-size 2 --tp-size 2 --batch-size 1 64 --output-len 64"),
    "prompt-1": Cell(V3, "", FIRST, lengths=PROMPT),
    "prompt-cp4": Cell(V3, "--tp-size 4 --attn-cp-size 4", FIRST, lengths=PROMPT),
    "long-tp4": Cell(V3, "--tp-size 4", FIRST, lengths=LONG),
    "long-dcp4": Cell(V3, "--tp-size 4 --dcp-size 4", FIRST, lengths=LONG),
    "671b-tp4": Cell(V3, "--tp-size 4 --batch-size 1 64 --output-len 64", WHOLE, (Goal(1, 0.45), Goal(64, 0.76))),
    "671b-dp4": Cell(V3, f"{DP4} --batch-size 256 --output-len 64", WHOLE, (Goal(256, 0.77),)),
    "671b-tp4-nextn2": Cell(V3, f"--tp-size 4 --batch-size 1 --output-len 128 {drafts(2)}", WHOLE),
    "v32-671b-tp4": Cell(V32, "--tp-size 4 --batch-size 1 64 --output-len 64", WHOLE),
    "v32-671b-dp4": Cell(V32, f"{DP4} --batch-size 256 --output-len 64", WHOLE),
    # of two GPUs
    "eleven-tp2": Cell(V3, "--tp-size 2 --batch-size 1 64 --output-len 64", FIRST),
    "eleven-pp2": Cell(V3, "--pp-size 2 --batch-size 1 64 --output-len 64", FIRST),
    "prompt-cp2": Cell(V3, "--tp-size 2 --attn-cp-size 2", FIRST, lengths=PROMPT),
    "long-tp2": Cell(V3, "--tp-size 2", FIRST, lengths=LONG),
    "long-dcp2": Cell(V3, "--tp-size 2 --dcp-size 2", FIRST, lengths=LONG),
}


def words(cell: Cell, folder: Path | None, result: Path, more: list[str]) -> list[str]:
    """The command of a cell."""
    made = [sys.executable, "-m", "thalweg", *cell.command.split(), *cell.flags.split(), "--output-file", str(result)]
    return made if folder is None else [*made, "--model", str(folder), *COMMON.split(), *cell.lengths.split(), *more]


def with_changes(folder: Path, changes: Mapping[str, Any], into: Path) -> Path:
    """A copy of a model's small files with another configuration."""
    made = into / folder.name
    shutil.copytree(folder, made, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | dict(changes)))
    return made


def run(name: str, cell: Cell, asked: argparse.Namespace, seconds: float) -> bool:
    """Runs a cell, at most so many seconds. Returns whether it has a result."""
    result, failed = asked.out / f"{name}.json", asked.out / f"{name}.failed.txt"
    changes = {**({"num_hidden_layers": asked.layers} if cell.model == V3 else {}), **cell.changes}
    with tempfile.TemporaryDirectory() as scratch:
        folder = with_changes(asked.models / cell.model, changes, Path(scratch)) if cell.model else None
        command, begun = words(cell, folder, result, asked.more), time.monotonic()
        print(f"{name}: thalweg {' '.join(command[3:])}", flush=True)
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
            )
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as late:
            output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
            code = -1
    print(f"{name}: exit code {code} after {time.monotonic() - begun:.0f} s", flush=True)
    if code == 0 and result.is_file():
        failed.unlink(missing_ok=True)
        return True
    failed.write_text("\n".join(output.splitlines()[-60:]) + f"\nexit code {code}\n")
    result.unlink(missing_ok=True)
    return False


def rows(name: str, result: Path) -> Iterator[str]:
    """Lines of the table of a cell: each batch size against its limit and its goal."""
    goals = {goal.batch: goal for goal in CELLS[name].goals}
    for row in json.loads(result.read_text()).get("results", ()):
        goal = goals.get(row["batch_size"], Goal(0))
        cells = []
        for kind, seconds, wanted in (
            ("decode", row["median_decode_latency"], goal.decode),
            ("prefill", row["prefill_latency"], goal.prefill),
        ):
            share = row.get(f"{kind}_share")
            cells += [f"{1e3 * seconds:.2f}", f"{share:.2f}" if share else "", f"{wanted:.2f}" if wanted else ""]
        accepted = row.get("accept_length")
        yield f"| {name} | {row['batch_size']} | {' | '.join(cells)} | {f'{accepted:.2f}' if accepted else ''} |"


def table(out: Path) -> str:
    heads = "cell", "batch", "decode ms", "of the limit", "goal", "prefill ms", "of the limit", "goal", "accept length"
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name in CELLS:
        if (result := out / f"{name}.json").is_file():
            lines += rows(name, result)
    return "\n".join(lines)


def main() -> int:
    """0 where every cell that was asked for has a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="the folder of the models' folders")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="which, in this order")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of DeepSeek-V3; default: {LAYERS}")
    parser.add_argument("--time-limit", type=float, default=560, help="seconds of this command")
    parser.add_argument("--cell-limit", type=float, default=180, help="seconds of a cell")
    parser.add_argument("--table", action="store_true", help="print what there is, and run nothing")
    parser.add_argument("more", nargs="*", help="further flags of every cell with a model, after --")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.out, until = asked.out.resolve(), time.monotonic() + asked.time_limit
    missing = [name for name in asked.cells if not (asked.out / f"{name}.json").is_file()]
    for name in [] if asked.table else missing:
        left = until - time.monotonic()
        if left < 20:
            print(f"{name}: no time is left")
            continue
        run(name, CELLS[name], asked, min(left, asked.cell_limit))
    print(table(asked.out))
    return int(any(not (asked.out / f"{name}.json").is_file() for name in asked.cells))


if __name__ == "__main__":
    sys.exit(main())
