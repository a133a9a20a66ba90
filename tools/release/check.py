"""The gate before a release: `python -m tools.release.check` (`make release-check`). Every part runs, whatever the
others say.

| part | passes when |
| --- | --- |
| compose | every pair of features, and every triple of the ablation's columns, gives the plain engine's tokens |
| parity | logits agree with transformers' on random configurations |
| long | a prompt of nearly the whole context, in chunks, with drafts and prefix hits, gives the plain engine's tokens |
| speed | the bundled model generates at least 0.4 of the committed times faster than transformers |
| evals | the bundled tasks are answered as well as the committed evaluation says, within both intervals |
| soak | the random drivers of cache and scheduler run, and their committed results are as new as that code |
| gpu | each GPU result behind a line of docs/support.md is as new as the code that it measures (`benchmarks/index.yaml`) |
| docs | every table is its result's, every line of docs/support.md has one, and its settings and tests are there |
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.release import ages, docs

ROOT = Path(__file__).parents[2]
EVALS = ROOT / "benchmarks" / "cpu" / "eval_tiny.json"
SPEED = ROOT / "benchmarks" / "cpu" / "compare_transformers.json"
SPEED_SHARE = 0.4  # of the committed ratio: a busy machine slows the two unevenly
SPEED_TRIES = 3
TASKS = ("sums", "recall", "tools")
WHOLE = {"code": ["thalweg"], "again": "with the command that it names"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """words: what was found, one sentence a line."""

    ok: bool
    words: tuple[str, ...]


def pytest(*paths: str) -> Verdict:
    """Runs tests; the last line of what they say."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["pytest said nothing"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Verdict(done.returncode == 0, (*failed[:10], lines[-1]))


def compose(args: argparse.Namespace) -> Verdict:
    return pytest("tests/compose")


def long(args: argparse.Namespace) -> Verdict:
    return pytest("tests/compose/test_long.py")


def speed(args: argparse.Namespace) -> Verdict:
    """Of one sequence, in one run with transformers."""
    least = SPEED_SHARE * ratio_of(json.loads(SPEED.read_text(encoding="utf-8")))
    words = ["models/tiny", "--batch-size", "1", "--rounds", "2", "--input-len", "64", "--output-len", "64"]
    said: list[str] = []
    for _ in range(SPEED_TRIES):
        found, why = thalweg("bench", "compare-transformers", *words)
        if found is None:
            return Verdict(False, (*said, why))
        said.append(f"{ratio_of(found):.2f} times as fast as transformers, at least {least:.2f} is expected")
        if ratio_of(found) >= least:
            return Verdict(True, tuple(said))
    return Verdict(False, tuple(said))


def ratio_of(result: dict[str, Any]) -> float:
    """Thalweg's rate / transformers', of one sequence."""
    return float(next(row["ratio"] for row in result["results"] if row["batch_size"] == 1))


def thalweg(*words: str) -> tuple[dict[str, Any] | None, str]:
    """The result that a command of thalweg writes; None and why where it failed."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "thalweg", *words, "--output-file", str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            return None, f"thalweg {' '.join(words)} ended with {done.returncode}: {last}"
        return json.loads(out.read_text(encoding="utf-8")), ""


def parity(args: argparse.Namespace) -> Verdict:
    return pytest("tests/cpu/test_models_parity.py", "tests/cpu/test_models_nextn.py", "tests/cpu/test_models_tiny.py")


def evals(args: argparse.Namespace) -> Verdict:
    """The bundled tasks again, with fewer items."""
    found, why = thalweg("eval", "models/tiny", "--tasks", *TASKS, "--items", str(args.items))
    if found is None:
        return Verdict(False, (why,))
    return same_answers(json.loads(EVALS.read_text(encoding="utf-8")), found)


def same_answers(committed: dict[str, Any], now: dict[str, Any]) -> Verdict:
    """Whether each share of `now` may be the committed one: its interval reaches the committed interval's low end."""
    before = {row["task"]: row for row in committed["results"]}
    said, ok = [], True
    for row in now["results"]:
        was = before.get(row["task"])
        if was is None:
            said.append(f"{row['task']}: {row['share']:.1%}, and the committed evaluation does not have it")
            continue
        worse = row["high_95"] < was["low_95"]
        ok = ok and not worse
        said.append(
            f"{row['task']}: {row['share']:.1%} of {row['total']}, committed {was['share']:.1%} of"
            f" {was['total']}{': worse' if worse else ''}"
        )
    return Verdict(ok, tuple(said))


def soak(args: argparse.Namespace) -> Verdict:
    ran = pytest("tests/soak", "-m", "soak")
    aged = list(_ages("soak/"))
    return Verdict(ran.ok and all(ok for _, ok, _ in aged), (*ran.words, *(words for *_, words in aged)))


def gpu(args: argparse.Namespace) -> Verdict:
    """Tables of other pages say of which commit and day they are, and stay true as records."""
    needed = {line["result"] for line in docs.index().support}
    aged = sorted((name not in needed, ok, words) for name, ok, words in _ages("gpu/"))  # those needed and old first
    late = [words for is_record, ok, words in aged if not ok and not is_record]
    return Verdict(not late, tuple(words for *_, words in aged) or ("there are no GPU results",))


def _ages(under: str) -> Iterator[tuple[str, bool, str]]:
    """(name, as new as its code, in words) of each committed result of a folder."""
    rows = {name: row for row in docs.index().results for name in row["files"]}
    for path in sorted((docs.BENCHMARKS / under).rglob("*.json")):
        name = path.relative_to(docs.BENCHMARKS).as_posix()
        row = rows.get(name, WHOLE)
        try:
            one = ages.age(ROOT, f"benchmarks/{name}", docs.read(name), row["code"])
        except (ages.NoHistory, docs.DocsError) as error:
            yield name, False, f"benchmarks/{name}: how old it is cannot be told: {error}"
        else:
            yield name, not one.old, ages.words(f"benchmarks/{name}", one, row["again"])


def documents(args: argparse.Namespace) -> Verdict:
    problems = docs.wrong()
    lines = len(docs.index().support)
    return Verdict(
        not problems, tuple(problems) or (f"every table is its result's; {lines} lines of docs/support.md have one",)
    )


PARTS: dict[str, Callable[[argparse.Namespace], Verdict]] = {
    "docs": documents,
    "gpu": gpu,
    "parity": parity,
    "evals": evals,
    "speed": speed,
    "long": long,
    "compose": compose,
    "soak": soak,
}


def main(words: Sequence[str]) -> int:
    """0: all parts passed, 1: not."""
    parser = argparse.ArgumentParser(prog="make release-check", description="What a release needs, part by part.")
    parser.add_argument(
        "--only", nargs="+", choices=tuple(PARTS), default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--items", type=int, default=200, metavar="N", help="items a task of the evals (default: 200)")
    args = parser.parse_args(words)
    verdicts = {}
    for name in args.only:
        begin = time.perf_counter()
        verdicts[name] = PARTS[name](args)
        state = "passed" if verdicts[name].ok else "FAILED"
        print(f"{name}: {state}, {time.perf_counter() - begin:.0f} s", flush=True)
        print("\n".join(f"  {line}" for line in verdicts[name].words), flush=True)
    failed = [name for name, verdict in verdicts.items() if not verdict.ok]
    print(f"not ready for a release: {', '.join(failed)}" if failed else f"passed: {', '.join(verdicts)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
