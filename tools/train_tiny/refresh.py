"""Makes again, on a CPU, what depends on the bundled model: `python -m tools.train_tiny.refresh` after `models/tiny` or
`models/tiny-eagle3` was replaced.

It measures `results.json` if that is missing or has no `agents`, writes the table in `models/tiny/README.md` from it,
runs each command of `benchmarks/index.yaml` that measures this model without a GPU, and writes the tables of the docs.
`--list` prints the commands, `--only TEXT` runs those with the text, and results whose index names no exact command are
listed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tools.train_tiny.evaluate import table

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "models" / "tiny"
OPENING, CLOSING = "<!-- results -->\n", "<!-- end -->"


def write_table() -> None:
    """The results in the README, between its two marks."""
    page = FOLDER / "README.md"
    before, opening, rest = page.read_text(encoding="utf-8").partition(OPENING)
    _, closing, after = rest.partition(CLOSING)
    if not (opening and closing):
        raise SystemExit(f"{page}: needs {OPENING.strip()} and {CLOSING} around the table of results")
    results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    page.write_text(f"{before}{opening}{table(results)}\n{closing}{after}", encoding="utf-8")


def commands() -> tuple[list[str], list[str]]:
    """Shell commands in the order to run them, and the results for which there is none."""
    entries: list[dict[str, Any]] = yaml.safe_load((ROOT / "benchmarks" / "index.yaml").read_text())["results"]
    found, by_hand = list[str](), list[str]()
    for entry in entries:
        again = entry["again"]
        on_cpu = [name for name in entry["files"] if name.startswith("cpu/")]
        if on_cpu and "models/tiny" in again:
            python = shlex.quote(sys.executable)
            program, _, rest = again.partition(" ")
            found.append(f"{python} {rest}" if program == "python" else f"{python} -m {program} {rest}")
        elif on_cpu and "models/tiny" in entry["code"]:
            by_hand += on_cpu
    return [*found, f"{shlex.quote(sys.executable)} -m tools.release.docs"], by_hand


def main() -> int:
    """0: all was made again; 1: a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only the commands with this text")
    options = parser.parse_args()
    found, by_hand = commands()
    path = FOLDER / "results.json"
    if not path.exists() or "agents" not in json.loads(path.read_text()):
        found.insert(0, f"{shlex.quote(sys.executable)} -m tools.train_tiny.evaluate models/tiny --items 200")
    found = [command for command in found if options.only in command]
    failed = []
    for command in found:
        print(f"$ {command}", flush=True)
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        if not options.list and subprocess.run(command, shell=True, cwd=ROOT, env=variables).returncode:
            failed.append(command)
    if not options.list:
        write_table()
    for name in by_hand:
        print(f"benchmarks/{name}: again with the command that it names")
    for command in failed:
        print(f"failed: {command}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
