"""Peak memory of `thalweg quantize` with 2 and with 4 layers of DeepSeek-V3's widths, each in a process of its own.

    python -m benchmarks.quantize_memory --output-file benchmarks/cpu/quantize_memory.json

Weights are random, FP8 in blocks of 128 x 128. Widths are V3's; layers have `--experts` routed experts in place of 256,
because memory depends on the size of a weight and not on how many there are. Embedding and head are copied whole, so
one vocabulary is V3's, and one is too small to hide a growth with layers. One thread is the default: with two, the peak
depends on which weights are in work at the same time, and five runs of the same 2 layers differ by 12 %. Exits with 1
where 4 layers take over 5 % more than 2, or any run takes 8 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.cpu.plan_models import DEEPSEEK
from thalweg.bench.results import provenance, write
from thalweg.quantize.targets import TARGETS

LAYERS = (2, 4)
V3_VOCAB, SMALL_VOCAB = 129280, 1024
MOST_GROWTH, MOST_BYTES = 1.05, 8 << 30
V3 = DEEPSEEK | {"first_k_dense_replace": 0, "torch_dtype": "bfloat16"}


def thalweg(*words: str) -> int:
    """Runs a command of this installation. Returns the peak resident size of its process in bytes. Raises
    CalledProcessError.
    """
    command = [sys.executable, "-m", "thalweg", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_maxrss * 1024


def measured(layers: int, vocab: int, experts: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each format. Files are removed at the end."""
    rows = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        shape, model, out = (Path(scratch) / name for name in ("shape", "model", "out"))
        shape.mkdir()
        config = V3 | {"num_hidden_layers": layers, "vocab_size": vocab, "n_routed_experts": experts}
        (shape / "config.json").write_text(json.dumps(config))
        thalweg("bench", "make-checkpoint", str(shape), str(model), "--shard-size", "2", "--device", "cpu")
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        for name in options.formats:
            start, words = time.monotonic(), ("--format", name, "--threads", str(options.threads))
            peak = thalweg("quantize", str(model), str(out / name), *words)
            row = {"format": name, "vocab": vocab, "layers": layers, "experts": experts, "source_bytes": size}
            rows.append(row | {"peak_bytes": peak, "seconds": round(time.monotonic() - start, 1)})
            print(rows[-1], flush=True)
    return rows


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each format and vocabulary: the peak with the most layers over that with the fewest."""
    few, many = ([row for row in rows if row["layers"] == layers] for layers in (LAYERS[0], LAYERS[-1]))
    return [
        {"format": a["format"], "vocab": a["vocab"], "ratio": b["peak_bytes"] / a["peak_bytes"]}
        for a, b in zip(few, many, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["w4afp8", "int8"], choices=TARGETS)
    parser.add_argument("--experts", type=int, default=16, help="routed experts of a layer")
    parser.add_argument("--threads", type=int, default=1, help="weights that are rounded at a time")
    parser.add_argument("--scratch", help="folder for checkpoints of up to 8 GB; default: the system's")
    parser.add_argument("--output-file", type=Path, required=True)
    options = parser.parse_args()
    sizes = [(layers, vocab) for vocab in (SMALL_VOCAB, V3_VOCAB) for layers in LAYERS]
    rows = [row for layers, vocab in sizes for row in measured(layers, vocab, options.experts, options)]
    head = provenance("", [], {})
    head["command"] = " ".join(["python", "-m", "benchmarks.quantize_memory", *sys.argv[1:]])
    ratios = growth(rows)
    write(options.output_file, {**head, "threads": options.threads, "rows": rows, "growth": ratios})
    most = max(row["peak_bytes"] for row in rows)
    sys.exit(most >= MOST_BYTES or any(one["ratio"] > MOST_GROWTH for one in ratios))


if __name__ == "__main__":
    main()
