"""Accuracy of a model in every format, beside the model as it is.

    python -m benchmarks.formats models/tiny --items 200 --output-file benchmarks/cpu/formats_tiny.json

Each row is one `thalweg quantize`, or of other formats one `benchmarks.checkpoints`, and one `thalweg eval` of what it
wrote, in processes of their own. Of formats that differ in their layout alone the first is evaluated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import CONFIGS, SPELLINGS
from thalweg.bench.results import provenance, write
from thalweg.quantize.targets import TARGETS

FORMATS = [*TARGETS, *(name for name in CONFIGS if not any(name in names[1:] for names in SPELLINGS))]
TASKS = ("sums", "recall", "tools", "agents", "dialogue")


def run(module: str, *words: str) -> None:
    """A command of this installation. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", module, *words], check=True)


def evaluated(folder: Path, items: int, scratch: Path) -> list[dict[str, Any]]:
    """The results of `thalweg eval`."""
    out = scratch / "eval.json"
    run("thalweg", "eval", str(folder), "--tasks", *TASKS, "--items", str(items), "--output-file", str(out))
    results: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["results"]
    kept = ("task", "hits", "total", "share", "low_95", "high_95", "perplexity", "bits_per_byte")
    return [{name: one[name] for name in kept if name in one} for one in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--items", type=int, default=200, help="of each task")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--output-file", type=Path, required=True)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("as it is", *options.formats):
            folder = options.model
            if name != "as it is":
                folder = Path(scratch) / name
                command = ("thalweg", "quantize") if name in TARGETS else ("benchmarks.checkpoints",)
                run(*command, str(options.model), str(folder), "--format", name)
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            rows.append({"format": name, "bytes": size, "tasks": evaluated(folder, options.items, Path(scratch))})
    head = provenance("", [], {})
    head["command"] = " ".join(["python", "-m", "benchmarks.formats", *sys.argv[1:]])
    write(options.output_file, {**head, "items": options.items, "rows": rows})


if __name__ == "__main__":
    main()
