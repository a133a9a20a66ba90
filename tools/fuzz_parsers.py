"""Fuzzes the parsers of answers and the prompt encoders: coverage-guided, with atheris (`pip install atheris`), outside
CI.

    python -m tools.fuzz_parsers fuzz --seconds 3600 --corpus DIR --log benchmarks/fuzz/parsers.log
    python -m tools.fuzz_parsers replay DIR      # needs no atheris: runs inputs again; the first that fails ends it

The first byte of an input chooses the check of `tools.fuzz_checks`, the rest is its request. An input that fails stands
in DIR as `crash-*`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MACHINE = ("parser", "lexer", "event_builder", "events", "partial_json", "tools_json", "tools_dsml")
STATUS = re.compile(r"^#(\d+)\s+(\w+)\s+cov: (\d+) ft: (\d+) corp: (\d+)/(\S+)", re.M)


def run_one(data: bytes) -> None:
    """One input. Raises AssertionError with the reason, or whatever the code under test raised."""
    checks = importlib.import_module("tools.fuzz_checks")
    check = checks.check_prompt if data[:1] and data[0] % 4 == 3 else checks.check_answer
    check(data[1:])


def fuzz(seconds: int, corpus: Path, log: Path) -> int:
    """Runs the fuzzer in a process of its own (it ends the process it is in), and writes what it found to `log`."""
    corpus.mkdir(parents=True, exist_ok=True)
    before = set(corpus.glob("crash-*"))
    flags = [
        f"-max_total_time={seconds}",
        "-max_len=160",
        "-timeout=20",
        "-print_final_stats=1",
        f"-artifact_prefix={corpus}/",
    ]
    source, started = machine(), time.monotonic()
    worker = [sys.executable, "-m", "tools.fuzz_parsers", "worker", str(corpus), *flags]
    done = subprocess.run(worker, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    took = time.monotonic() - started
    crashes = sorted(path.name for path in set(corpus.glob("crash-*")) - before)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(_report(done.stderr, done.returncode, took, seconds, crashes, source), encoding="utf-8")
    return done.returncode


def machine() -> str:
    """A hash of the parser machine's source: what a log was made with, whatever the commit is called later."""
    digest = hashlib.sha256()
    for name in MACHINE:
        digest.update((ROOT / "thalweg" / "text" / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def _report(output: str, status: int, took: float, seconds: int, crashes: list[str], source: str) -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    head = [
        f"date      {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC",
        (
            f"versions  Python {platform.python_version()}, atheris {importlib.metadata.version('atheris')},"
            f" {platform.system()} {platform.machine()}"
        ),
        f"commit    {commit.stdout.strip()}; machine {source} (sha256 of thalweg/text/{{{','.join(MACHINE)}}}.py)",
        f"command   python -m tools.fuzz_parsers fuzz --seconds {seconds}",
        f"ran       {took:.0f} s, exit status {status}",
        f"findings  {', '.join(crashes) or 'none'}",
    ]
    shown = [found.group() for found in STATUS.finditer(output)]
    stats = re.findall(r"^stat::.*$", output, re.M)
    trace = output[output.find("=== Uncaught Python exception") :].splitlines()[:40] if crashes else []
    kept = [line for i, line in enumerate(shown) if i < 2 or i >= len(shown) - 2 or (i & (i - 1)) == 0]
    return "\n".join([*head, "", *kept, *stats, *trace]).replace(f"{ROOT}/", "") + "\n"


def replay(paths: list[Path]) -> int:
    files = sorted(file for path in paths for file in (path.iterdir() if path.is_dir() else [path]))
    for file in files:
        print(file.name, end=" ", flush=True)
        run_one(file.read_bytes())
    print(f"\n{len(files)} inputs, none failed")
    return 0


def worker(arguments: list[str]) -> None:
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["thalweg.text"]):
        importlib.import_module("tools.fuzz_checks")
    atheris.Setup([sys.argv[0], *arguments], run_one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz_parsers", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    fuzzing = commands.add_parser("fuzz")
    fuzzing.add_argument("--seconds", type=int, default=3600)
    fuzzing.add_argument("--corpus", type=Path, required=True)
    fuzzing.add_argument("--log", type=Path, required=True)
    commands.add_parser("replay").add_argument("paths", type=Path, nargs="+")
    found = parser.parse_args()
    return replay(found.paths) if found.command == "replay" else fuzz(found.seconds, found.corpus.resolve(), found.log)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2:])
    sys.exit(main())
