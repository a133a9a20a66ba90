"""Runs one fuzzer for some minutes, keeps the inputs that cover new lines, and writes what it found."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import platform
import random
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tools.fuzz.target import Target

ROOT = Path(__file__).parents[2]
CORPUS, RESULTS = ROOT / "tests" / "cpu" / "data" / "fuzz", ROOT / "benchmarks" / "fuzz"
TARGETS = {"http": "HttpBodies", "wire": "Wire", "checkpoint": "CheckpointFiles", "parsers": "Parsers"}
MAX_CORPUS = 100_000  # bytes of a target's corpus
FAILURES_SHOWN = 20


@dataclass
class Result:
    target: str
    command: str
    commit: str
    versions: str
    began: str
    seconds: float = 0.0
    inputs: int = 0
    lines: int = 0  # covered, of the packages of the target
    corpus: int = 0  # inputs in it at the end
    num_failures: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)  # one of each kind
    outcomes: dict[str, int] = field(default_factory=dict)


def target_of(name: str) -> Target:
    target: Target = getattr(importlib.import_module(f"tools.fuzz.{name}"), TARGETS[name])()
    return target


def corpus_of(name: str) -> list[Any]:
    entries: list[Any] = json.loads((CORPUS / f"{name}.json").read_text(encoding="utf-8"))
    return entries


class Coverage:
    """The lines that have run, in all threads that start later."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.lines: set[tuple[str, int]] = set()
        self._prefixes = tuple(str(ROOT / "thalweg" / package) for package in packages)

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def _enter(self, frame: FrameType, event: str, value: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._prefixes) else None

    def _line(self, frame: FrameType, event: str, value: Any) -> Any:
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def fuzz(name: str, seconds: float, seed: int) -> Result:
    draw, target, corpus = random.Random(seed), target_of(name), corpus_of(name)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    began, shown = time.monotonic(), time.monotonic()
    versions = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    command = f"python -m tools.fuzz {name} --minutes {seconds / 60:g} --seed {seed}"
    result = Result(name, command, commit.strip(), versions, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    outcomes, kinds, coverage = Counter[str](), set[str](), Coverage(target.packages)
    size, fresh, num_seeds = sum(len(json.dumps(entry)) for entry in corpus), list(corpus), len(corpus)
    with coverage.collected(), contextlib.ExitStack() as running:
        running.enter_context(target)
        while fresh or time.monotonic() - began < seconds:
            covered = len(coverage.lines)
            entry = fresh.pop() if fresh else target.mutate(draw.choice(corpus), draw, draw.choice(corpus))
            is_mutated = result.inputs >= num_seeds
            result.inputs += 1
            try:
                outcome = target.run(entry)
            except Exception as error:  # noqa: BLE001  whatever the code under test raises
                outcome = f"failed: {type(error).__name__}"
                frame = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{type(error).__name__} {frame.filename}:{frame.lineno}"
                result.num_failures += 1
                if kind not in kinds and len(kinds) < FAILURES_SHOWN:
                    text = "".join(traceback.format_exception(error)[-6:])
                    result.failures.append({"input": entry, "error": text.splitlines()[-1][:500]})
                    print(f"FAILED on {json.dumps(entry)[:3000]}\n{text}", flush=True)
                kinds.add(kind)
                running.close()
                running.enter_context(target)
            else:
                length = len(json.dumps(entry))
                if is_mutated and len(coverage.lines) > covered and length < 8000 and size + length < MAX_CORPUS:
                    corpus.append(entry)
                    size += length
            outcomes[outcome] += 1
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                print(
                    f"{name} {shown - began:.0f} s: {result.inputs} inputs, {len(coverage.lines)} lines,"
                    f" {len(corpus)} in the corpus, {len(outcomes)} outcomes, {result.num_failures} failures",
                    flush=True,
                )
    result.seconds = round(time.monotonic() - began, 1)
    result.lines, result.corpus = len(coverage.lines), len(corpus)
    result.outcomes = dict(outcomes.most_common(60))
    (CORPUS / f"{name}.json").write_text("[\n" + ",\n".join(map(json.dumps, corpus)) + "\n]\n", encoding="utf-8")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-file", type=Path, help="default: benchmarks/fuzz/TARGET.json")
    wish = parser.parse_args()
    logging.disable(logging.CRITICAL)  # refused messages are logged
    result = fuzz(wish.target, wish.minutes * 60, wish.seed)
    path = wish.output_file or RESULTS / f"{wish.target}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
    print(f"{path}: {result.inputs} inputs, {result.num_failures} failures")
    return 1 if result.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
