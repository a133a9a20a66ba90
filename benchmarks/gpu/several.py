"""One model on several GPUs: cells, each a command of its own with a result of its own, and how they did.

    python benchmarks/gpu/several.py --models FOLDER --out benchmarks/gpu/h200x4 [--cells qwen-tp4 v3-tp4 ...]
    python benchmarks/gpu/several.py --out benchmarks/gpu/h200x4 --table
    python benchmarks/gpu/several.py --models FOLDER --out benchmarks/gpu/h100x4 --layers 20
    python benchmarks/gpu/several.py --models FOLDER --out OUT --cells v3-12-http-tp4 qwen-http-qps --checkpoints DISK \
        --trace azure2023_conv.csv

--models has folders of true shapes (qwen2.5-72b, deepseek-v3, deepseek-v32-slim: config.json and a tokenizer, and
qwen2.5-72b-eagle3: the config.json of a head); weights are random. A cell whose result is there does not run again, so
the same command goes on where it ended. A cell that does not end in time, or fails, leaves the end of its output in
NAME.failed.txt and is tried again by the next command.

Cells with loads start `thalweg serve` and send them with `thalweg bench serve`; one failed request fails the cell. With
--checkpoints the server of the first 12 layers of DeepSeek-V3 reads its weights (109 GB) from a checkpoint that
`thalweg bench make-checkpoint` writes there once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import several_http
from peer_loads import STAGGERED
from peer_loads import Cell as Load

from thalweg.bench.display import markdown_table
from thalweg.bench.errors import BenchError
from thalweg.core.errors import ThalwegError

ROOT = Path(__file__).resolve().parents[2]
COMMON = "--load-format dummy --repeat 2"
DP4 = "--tp-size 4 --dp-size 4 --enable-dp-attention --ep-size 4"
FP8_CHANNEL = {  # compressed-tensors with a scale for each output channel, and for each row of activations
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
TWELVE = {"num_hidden_layers": 12}  # 3 dense ones and 9 with experts
PROMPT = "--batch-size 1 --input-len 32768 131072 --output-len 2 --context-length 131200 --chunked-prefill-size 16384"
LONG = "--batch-size 8 32 --input-len 32768 --output-len 64 --context-length 32896 --fill-cache"
CLOSED = tuple(Load(1024, 256, count) for count in (1, 8, 16, 32, 64, 128, 512))
TRACE = "{trace}"  # the file of --trace
RATES = tuple(Load(8192, 2048, rate=rate, requests=20 * rate, warm=8, trace=TRACE) for rate in (1, 5, 10, 20, 50))
BUSY = (Load(1024, 512, 256, STAGGERED, requests=768, warm=8),)
FULL = (Load(32768, 64, 32, requests=32, warm=1),)


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
    common: str = COMMON
    loads: tuple[Load, ...] = ()  # of a server; all again until they have taken `least_seconds`
    least_seconds: float = 0.0
    seconds: float = 0.0  # that it may take, where that is more than --cell-limit
    is_written: bool = False  # it reads a checkpoint in --checkpoints, where that is given


def drafts(count: int, algorithm: str = "NEXTN", accepted: float = 2.5) -> str:
    steps = f"--speculative-num-steps {count} --speculative-num-draft-tokens {count + 1} --speculative-eagle-topk 1"
    return f"--speculative-algorithm {algorithm} {steps} --speculative-simulate-accept-length {accepted}"


def start(flags: str) -> Cell:
    """How long a server takes to its first token."""
    lengths = "--cold 1 --warm 1 --context-length 4096"
    return Cell(V3, flags, FIRST, command="bench startup", lengths=lengths, common="--load-format dummy")


def http(model: str, flags: str, loads: tuple[Load, ...], changes: Mapping[str, Any] = {}, **more: Any) -> Cell:
    """A server under these loads."""
    return Cell(model, flags, changes, command="serve", lengths="", common="--load-format dummy", loads=loads, **more)


def accept(flags: str) -> Cell:
    """Accepted drafts of the bundled model's NextN layer."""
    lengths = "--tasks sums recall --items 110 --widths 2"
    return Cell(TINY, flags, command="bench acceptance", lengths=lengths, common="")


TINY = "tiny"  # the bundled model, with its weights
QWEN, V3, V32 = "qwen2.5-72b", "deepseek-v3", "deepseek-v32-slim"
CELLS = {
    "collectives": Cell("", "--tp-size 4", command="bench collectives"),
    "qwen-tp4": Cell(
        QWEN, "--tp-size 4 --batch-size 1 64 --output-len 64", goals=(Goal(1, 0.90, 0.75), Goal(64, 0.84))
    ),
    "qwen-tp4-grid": Cell(
        QWEN,
        "--tp-size 4 --batch-size 1 --output-len 128 512",
        lengths="--input-len 128 512 2048 8192 --context-length 8768 --chunked-prefill-size 8192",
    ),
    "qwen-tp4-eagle3": Cell(
        QWEN,
        f"--tp-size 4 --batch-size 1 --output-len 128 {drafts(3, 'EAGLE3', 3)}"
        " --speculative-draft-model-path {models}/qwen2.5-72b-eagle3",
    ),
    "qwen-tp2": Cell(QWEN, "--tp-size 2 --batch-size 1 64 --output-len 64"),
    "qwen-fp8-1": Cell(QWEN, "--batch-size 1 64 --output-len 64", FP8_CHANNEL),
    "qwen-fp8-tp2": Cell(QWEN, "--tp-size 2 --batch-size 1 64 --output-len 64", FP8_CHANNEL),
    "qwen-fp8-tp4": Cell(QWEN, "--tp-size 4 --batch-size 1 64 --output-len 64", FP8_CHANNEL),
    "v3-tp4": Cell(V3, "--tp-size 4 --batch-size 1 64 --output-len 64", goals=(Goal(1, 0.50), Goal(64, 0.86))),
    "v3-dp4": Cell(V3, f"{DP4} --batch-size 256 --output-len 64", goals=(Goal(256, 0.80),)),
    "v3-tp4-nextn2": Cell(V3, f"--tp-size 4 --batch-size 1 --output-len 128 {drafts(2)}"),
    "v3-tp4-nextn3": Cell(V3, f"--tp-size 4 --batch-size 1 --output-len 128 {drafts(3)}"),
    "v3-pp2-tp2": Cell(V3, "--pp-size 2 --tp-size 2 --pp-layer-partition 23 22 --batch-size 1 64 --output-len 64"),
    "prompt-1": Cell(V3, "", FIRST, lengths=PROMPT),
    "prompt-cp4": Cell(V3, "--tp-size 4 --attn-cp-size 4", FIRST, lengths=PROMPT),
    "long-tp4": Cell(V3, "--tp-size 4", FIRST, lengths=LONG),
    "long-dcp4": Cell(V3, "--tp-size 4 --dcp-size 4", FIRST, lengths=LONG),
    "671b-tp4": Cell(V3, "--tp-size 4 --batch-size 1 64 --output-len 64", WHOLE, (Goal(1, 0.45), Goal(64, 0.76))),
    "671b-dp4": Cell(V3, f"{DP4} --batch-size 256 --output-len 64", WHOLE, (Goal(256, 0.77),)),
    "671b-tp4-nextn2": Cell(V3, f"--tp-size 4 --batch-size 1 --output-len 128 {drafts(2)}", WHOLE),
    "v32-671b-tp4": Cell(V32, "--tp-size 4 --batch-size 1 64 --output-len 64", WHOLE),
    "v32-671b-dp4": Cell(V32, f"{DP4} --batch-size 256 --output-len 64", WHOLE),
    "start-1": start(""),
    "start-4": start("--tp-size 4"),
    "accept-tp4": accept("--tp-size 4"),
    "accept-dcp4": accept("--tp-size 4 --dcp-size 4"),
    # over HTTP; with data-parallel attention the limit of running requests is each rank's
    "v3-12-http-tp4": http(V3, "--tp-size 4", CLOSED, TWELVE, seconds=540, is_written=True),
    "v3-12-http-dp4": http(V3, f"{DP4} --max-running-requests 160", CLOSED, TWELVE, seconds=540, is_written=True),
    "qwen-http-qps": http(QWEN, "--tp-size 4", RATES, seconds=400),
    "long-http-tp4": http(V3, "--tp-size 4", FULL, FIRST),
    "long-http-dcp4": http(V3, "--tp-size 4 --dcp-size 4", FULL, FIRST),
    "671b-http-dp4": http(V3, f"{DP4} --max-running-requests 80", BUSY, WHOLE, least_seconds=300, seconds=550),
    # of two GPUs
    "eleven-tp2": Cell(V3, "--tp-size 2 --batch-size 1 64 --output-len 64", FIRST),
    "eleven-pp2": Cell(V3, "--pp-size 2 --pp-layer-partition 6 5 --batch-size 1 64 --output-len 64", FIRST),
    "prompt-cp2": Cell(V3, "--tp-size 2 --attn-cp-size 2", FIRST, lengths=PROMPT),
    "long-tp2": Cell(V3, "--tp-size 2", FIRST, lengths=LONG),
    "long-dcp2": Cell(V3, "--tp-size 2 --dcp-size 2", FIRST, lengths=LONG),
}


class Reading(NamedTuple):
    """A number of a cell's result."""

    cell: str
    field: str
    where: Mapping[str, Any] = {}  # fields of its row

    def value(self, out: Path) -> float | None:
        """Of the first such row; None where the cell has no result."""
        path = out / f"{self.cell}.json"
        rows = result_rows(json.loads(path.read_text())) if path.is_file() else []
        return next((row.get(self.field) for row in rows if self.where.items() <= row.items()), None)


class Ratio(NamedTuple):
    """A number over another, and what it is to be at least."""

    name: str
    above: Reading
    below: Reading
    goal: float

    def row(self, out: Path) -> list[object]:
        """Of the table; [] where a number is missing."""
        above, below = self.above.value(out), self.below.value(out)
        if above is None or not below:
            return []
        ratio = above / below
        return [self.name, above, below, ratio, self.goal, "yes" if ratio >= self.goal else "no"]


def of_cells(name: str, field: str, cells: tuple[str, str], goal: float, **where: Any) -> Ratio:
    """One field of two cells, the first over the second."""
    above, below = (Reading(cell, field, where) for cell in cells)
    return Ratio(name, above, below, goal)


def of_fields(name: str, cell: str, fields: tuple[str, str], goal: float, **where: Any) -> Ratio:
    """Two fields of one cell, the first over the second."""
    above, below = (Reading(cell, field, where) for field in fields)
    return Ratio(name, above, below, goal)


STAGES, LONG_STEP = ("v3-pp2-tp2", "v3-tp4"), {"batch_size": 8, "input_len": 32768}
LIMIT = ("decode_floor", "median_decode_latency")
RATIOS = (
    of_cells("PP2 x TP2 / TP4: prefill tok/s, 64 prompts", "prefill_throughput", STAGES, 0.95, batch_size=64),
    of_fields("PP2 x TP2: limit / decode s, batch 1", STAGES[0], LIMIT, 0.90, batch_size=1),
    of_fields("PP2 x TP2: limit / decode s, batch 64", STAGES[0], LIMIT, 0.90, batch_size=64),
    of_cells("1 GPU / CP4: prefill s of 32k", "prefill_latency", ("prompt-1", "prompt-cp4"), 3.0, input_len=32768),
    of_cells("1 GPU / CP4: prefill s of 128k", "prefill_latency", ("prompt-1", "prompt-cp4"), 3.2, input_len=131072),
    of_cells("DCP4 / TP4: tokens of the KV cache", "kv_tokens", ("long-http-dcp4", "long-http-tp4"), 3.8),
    of_fields("DCP4: answers / 32 requests of 32k", "long-http-dcp4", ("completed", "requests"), 1.0),
    of_cells("TP4 / DCP4: decode s of 8 x 32k", LIMIT[1], ("long-tp4", "long-dcp4"), 1.0, **LONG_STEP),
    of_cells("DCP4 / TP4: accept length, sums", "accept_length", ("accept-dcp4", "accept-tp4"), 0.99, task="sums"),
    of_cells("DCP4 / TP4: accept length, recall", "accept_length", ("accept-dcp4", "accept-tp4"), 0.99, task="recall"),
)


def result_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result of any command."""
    found = (result[name] for name in ("results", "points", "starts", "acceptance") if name in result)
    return list(next(found, []))


def words(cell: Cell, folder: Path | None, more: list[str], models: Path | None = None) -> list[str]:
    """The command of a cell behind `thalweg`, without its result's file."""
    sizes = several_http.server_flags(cell.loads) if cell.loads else []
    made = [*cell.command.split(), *sizes, *cell.flags.format(models=models).split()]
    return made if folder is None else [*made, "--model", str(folder), *f"{cell.common} {cell.lengths}".split(), *more]


def with_changes(folder: Path, changes: Mapping[str, Any], into: Path) -> Path:
    """A copy of a model's small files with another configuration."""
    made = into / folder.name
    shutil.copytree(folder, made, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | dict(changes)))
    return made


def execute(command: list[str], seconds: float) -> None:
    """Runs a command of `thalweg`. Raises BenchError with the end of its output where it fails or is too slow."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run([sys.executable, "-m", "thalweg", *command], cwd=ROOT, timeout=seconds, **options)
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        code = -1
    if code:
        raise BenchError("\n".join([*output.splitlines()[-60:], f"exit code {code}"]))


def written(shape: Path, into: Path, seconds: float) -> Path:
    """A checkpoint of random weights in this folder, written where it is missing. Raises BenchError."""
    if not into.is_dir():
        partial = into.with_name(f"{into.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        execute(["bench", "make-checkpoint", str(shape), str(partial)], seconds)
        partial.rename(into)
    return into


def folder_of(cell: Cell, asked: argparse.Namespace, scratch: Path, seconds: float) -> Path | None:
    """The model's folder of a cell; None of a command without a model. Raises BenchError."""
    if not cell.model:
        return None
    if cell.model == TINY:
        return ROOT / "models" / TINY
    changes = {**({"num_hidden_layers": asked.layers} if cell.model == V3 else {}), **cell.changes}
    shape = with_changes(asked.models / cell.model, changes, scratch)
    if not (cell.is_written and asked.checkpoints):
        return shape
    return written(shape, asked.checkpoints / f"{cell.model}-{changes['num_hidden_layers']}", seconds)


def measure(name: str, cell: Cell, asked: argparse.Namespace, result: Path, seconds: float) -> None:
    """Writes the result of a cell. Raises ThalwegError."""
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(cell, asked, Path(scratch), seconds)
        if folder is not None and cell.is_written and asked.checkpoints:
            cell = cell._replace(common="")
        command, left = words(cell, folder, asked.more, asked.models), until - time.monotonic()
        print(f"{name}: thalweg {' '.join(command)}", flush=True)
        if not cell.loads:
            return execute([*command, "--output-file", str(result)], left)
        if any(load.trace for load in cell.loads) and asked.trace is None:
            raise BenchError("its loads are of a recording: give --trace FILE")
        loads = [replace(load, trace=load.trace and str(asked.trace)) for load in cell.loads]
        several_http.run(command[1:], loads, cell.least_seconds, left, result)


def run(name: str, cell: Cell, asked: argparse.Namespace, seconds: float) -> bool:
    """Runs a cell, at most so many seconds. Returns whether it has a result."""
    result, failed = asked.out / f"{name}.json", asked.out / f"{name}.failed.txt"
    begun, problem = time.monotonic(), ""
    try:
        measure(name, cell, asked, result, seconds)
    except ThalwegError as error:
        problem = str(error)
    is_done = not problem and result.is_file()
    print(f"{name}: {'done' if is_done else 'failed'} after {time.monotonic() - begun:.0f} s", flush=True)
    if is_done:
        failed.unlink(missing_ok=True)
    else:
        failed.write_text(f"{problem or 'it wrote no result'}\n")
        result.unlink(missing_ok=True)
    return is_done


def rows(name: str, result: Path) -> Iterator[str]:
    """Lines of the table of a cell: each batch size against its limit and its goal, or the time of each start."""
    goals = {goal.batch: goal for goal in CELLS[name].goals}
    read = json.loads(result.read_text())
    for row in read.get("starts", ()):
        yield f"| {name}, {row['start']} | 1 | first token |  |  |  | {1e3 * row['first_token_seconds']:.0f} |  |  |  |"
    for row in read.get("acceptance", ()):
        yield f"| {name}, {row['task']} | | | | | | | | | {row['accept_length']:.2f} |"
    for row in read.get("results", ()):
        goal = goals.get(row["batch_size"], Goal(0))
        cells = []
        for kind, seconds, wanted in (
            ("decode", row["median_decode_latency"], goal.decode),
            ("prefill", row.get("prefill_latency"), goal.prefill),
        ):
            share = row.get(f"{kind}_share")
            numbers = (seconds and 1e3 * seconds, share, wanted)
            cells += [f"{number:.2f}" if number else "" for number in numbers]
        accepted = row.get("accept_length")
        lengths = f"{row['input_len']} + {row['output_len']}"
        length = f"{accepted:.2f}" if accepted else ""
        yield f"| {name} | {row['batch_size']} | {lengths} | {' | '.join(cells)} | {length} |"


def table(out: Path) -> str:
    """Markdown: the cells that run in one process, those over HTTP, and the ratios between cells."""
    times = [head for kind in ("decode", "prefill") for head in (f"{kind} ms", "of the limit", "goal")]
    heads = ["cell", "batch", "tokens", *times, "accept length"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name, cell in CELLS.items():
        if not cell.loads and (result := out / f"{name}.json").is_file():
            lines += rows(name, result)
    served = several_http.table(out, [name for name, cell in CELLS.items() if cell.loads])
    ratios = [row for ratio in RATIOS if (row := ratio.row(out))]
    compared = markdown_table(["ratio", "above", "below", "is", "goal", "reached"], ratios) if ratios else []
    return "\n\n".join("\n".join(part) for part in (lines, served, compared) if part)


def main() -> int:
    """0 where every cell that was asked for has a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="the folder of the models' folders")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="which, in this order")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of DeepSeek-V3; default: {LAYERS}")
    parser.add_argument("--time-limit", type=float, default=560, help="seconds of this command")
    parser.add_argument("--cell-limit", type=float, default=180, help="seconds of a cell; some have more")
    parser.add_argument("--trace", type=Path, help="the recording of the cells that send one, such as Azure's")
    parser.add_argument("--checkpoints", type=Path, help="folder for checkpoints that servers read; default: none")
    parser.add_argument("--table", action="store_true", help="print what there is, and run nothing")
    parser.add_argument("more", nargs="*", help="further flags of every cell with a model, after --")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends a cell's processes, too
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.out, until = asked.out.resolve(), time.monotonic() + asked.time_limit
    missing = [name for name in asked.cells if not (asked.out / f"{name}.json").is_file()]
    for name in [] if asked.table else missing:
        left = until - time.monotonic()
        if left < 20:
            print(f"{name}: no time is left")
            continue
        run(name, CELLS[name], asked, min(left, max(asked.cell_limit, CELLS[name].seconds)))
    print(table(asked.out))
    return int(any(not (asked.out / f"{name}.json").is_file() for name in asked.cells))


if __name__ == "__main__":
    sys.exit(main())
